"""Page tokens of listings (AIP-158): opaque, and good only for the listing that gave them."""

from __future__ import annotations

import base64
import hashlib
import json
import math

from modelpress.errors import InvalidRequest

DEFAULT_PAGE = 50
MAX_PAGE = 1000


def page_size(wanted: int) -> int:
    """0 means 50; more than 1000 is 1000."""
    if wanted < 0:
        raise InvalidRequest(f"page_size is {wanted}: it must be 0 to {MAX_PAGE}", field="page_size")
    return min(wanted or DEFAULT_PAGE, MAX_PAGE)


def make_token(created: float, last: str, listing: object) -> str:
    """The next page begins after `last`, which was made at `created`; `listing` names the tenant and the filters."""
    return base64.urlsafe_b64encode(json.dumps([_stamp(listing), created, last]).encode()).decode()


def read_token(token: str, listing: object) -> tuple[float, str] | None:
    """The position; None for the first page. InvalidRequest where this listing did not give the token."""
    if not token:
        return None
    try:
        stamp, created, last = json.loads(base64.urlsafe_b64decode(token.encode()))
        position = float(created), str(last)
        position[1].encode()
        known = stamp == _stamp(listing) and math.isfinite(position[0])
    except (ValueError, TypeError, OverflowError, RecursionError):
        known = False
    if not known:
        raise InvalidRequest(
            "page_token is not one that this listing gave: repeat the request of the former page with its token",
            field="page_token",
        )
    return position


def _stamp(listing: object) -> str:
    return hashlib.sha256(repr(listing).encode()).hexdigest()[:16]
