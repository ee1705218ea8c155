"""Page tokens of listings (AIP-158): opaque, and good only for the listing that gave them."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from modelpress.errors import InvalidRequest

DEFAULT_PAGE = 50
MAX_PAGE = 1000


def page_size(wanted: int) -> int:
    """0 means 50; more than 1000 is 1000."""
    if wanted < 0:
        raise InvalidRequest(f"page_size is {wanted}: it must be 0 to {MAX_PAGE}", field="page_size")
    return min(wanted or DEFAULT_PAGE, MAX_PAGE)


def make_token(position: Sequence[Any], listing: object) -> str:
    """`position` is where the next page begins; `listing` names the tenant and the filters."""
    return base64.urlsafe_b64encode(json.dumps([_stamp(listing), *position]).encode()).decode()


def read_token(token: str, listing: object) -> list[Any] | None:
    """The position; None for the first page. InvalidRequest where another listing gave the token."""
    if not token:
        return None
    try:
        stamp, *position = json.loads(base64.urlsafe_b64decode(token.encode()))
    except (ValueError, TypeError):
        stamp, position = None, []
    if stamp != _stamp(listing):
        raise InvalidRequest(
            "page_token is not one that this listing gave: repeat the request of the former page with its token",
            field="page_token",
        )
    return list(position)


def _stamp(listing: object) -> str:
    return hashlib.sha256(repr(listing).encode()).hexdigest()[:16]
