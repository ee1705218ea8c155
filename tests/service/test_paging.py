"""Page tokens: what a listing gave comes back as it was; whatever else comes is refused in one sentence."""

import base64
import json

import pytest

from modelpress.errors import InvalidRequest
from service.edge.paging import make_token, read_token

LISTING = ("default", ())
[STAMP, *_] = json.loads(base64.urlsafe_b64decode(make_token(1.5, "x", LISTING)))


def test_a_token_gives_back_the_position() -> None:
    assert read_token(make_token(1.5, "x", LISTING), LISTING) == (1.5, "x")
    assert read_token("", LISTING) is None


@pytest.mark.parametrize(
    "content",
    [
        [STAMP],
        [STAMP, 1.5],
        [STAMP, "late", "x"],
        [STAMP, None, None],
        [STAMP, [1], {}],
        [STAMP, float("nan"), "x"],
        [STAMP, 10**400, "x"],
        [STAMP, 1.5, "\ud800"],
        {"a": 1},
        3,
        ["other", 1.5, "x"],
    ],
)
def test_a_token_that_this_listing_did_not_give_is_refused(content: object) -> None:
    token = base64.urlsafe_b64encode(json.dumps(content).encode()).decode()
    with pytest.raises(InvalidRequest, match="page_token"):
        read_token(token, LISTING)


@pytest.mark.parametrize("data", [b"[" * 100_000, b"\xff", b""])
def test_a_token_that_is_no_json_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="page_token"):
        read_token(base64.urlsafe_b64encode(data).decode() or "!", LISTING)
