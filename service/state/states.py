"""The states of a conversion and the moves between them, in one table. Every write of a state goes through `move`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, update

from modelpress.errors import Conflict
from service.state.tables import conversions


class State(str, Enum):
    """The names stand in the database and, with a prefix, on the wire."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    CANCELLING = "CANCELLING"
    CANCELLED = "CANCELLED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


MOVES: Mapping[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.RUNNING, State.CANCELLED, State.FAILED}),
    State.RUNNING: frozenset({State.QUEUED, State.CANCELLING, State.SUCCEEDED, State.FAILED}),
    State.CANCELLING: frozenset({State.CANCELLED}),
    State.CANCELLED: frozenset({State.QUEUED}),
    State.SUCCEEDED: frozenset(),
    State.FAILED: frozenset({State.QUEUED}),
}
"""From -> to. RUNNING -> QUEUED: its worker or server is gone. CANCELLED, FAILED -> QUEUED: a retry was asked for."""

LEASED = (State.RUNNING, State.CANCELLING)
"""A server holds a lease on it."""

FINAL = (State.CANCELLED, State.SUCCEEDED, State.FAILED)
"""Nothing happens any more unless somebody asks for a retry."""


class LostLease(Conflict):
    """Another server took the conversion over, or it was moved elsewhere: this attempt's write is refused."""

    reason = "LOST_LEASE"


def sources(target: State) -> tuple[State, ...]:
    """The states from which `target` can be reached."""
    return tuple(state for state, targets in MOVES.items() if target in targets)


def move(
    connection: Connection, which: ColumnElement[bool], target: State, values: Mapping[str, Any]
) -> RowMapping | None:
    """Move the conversion that `which` selects to `target` and set `values`; None where no row may make that move.

    One statement, so that of two servers that try the same move one finds nothing. A move that ends a lease clears it.
    """
    lease = {} if target in LEASED else {"lease_holder": None, "lease_expires": None, "progress": None}
    statement = (
        update(conversions)
        .where(which, conversions.c.state.in_(sources(target)))
        .values(state=target.value, version=conversions.c.version + 1, **lease, **values)
        .returning(*conversions.c)
    )
    return connection.execute(statement).mappings().one_or_none()
