"""Conversions as a server holds them: claim, renew, give back, finish.

A claim gives a lease with a fence number that no earlier lease had. Every write of an attempt checks it, so that a
server that was thought dead and comes back can change nothing (LostLease).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, RowMapping, and_, func, or_, select, update

from modelpress.reports import Verdict
from service.failures import Failure, FailureKind
from service.state.artifacts import Artifact, record_artifact
from service.state.conversions import Conversion, conversion_of, queue_deadline
from service.state.events import Change, Journal
from service.state.states import LEASED, LostLease, State, move
from service.state.tables import conversions


@dataclass(frozen=True)
class Lease:
    """The right to write for one attempt at a conversion, until another one is given."""

    conversion: str
    holder: str
    fence: int


@dataclass(frozen=True)
class Result:
    """What a finished conversion leaves: its signed output folder, which is in the store, and the verdict."""

    output: Artifact
    verdict: Verdict
    reused_from: str | None


class Leases:
    """One server's view: `holder` names it, a lease lasts `lease_s` seconds without a renewal."""

    def __init__(self, journal: Journal, *, holder: str, lease_s: float) -> None:
        self._journal = journal
        self.holder = holder
        self.lease_s = lease_s

    def claim(self) -> tuple[Lease, Conversion] | None:
        """Take the queued conversion of the highest priority, the oldest of those; None where nothing is queued.

        One statement: two servers never take the same one.
        """
        with self._journal.change() as change:
            deadline = conversions.c.queue_deadline
            candidate = (
                select(conversions.c.id)
                .where(conversions.c.state == State.QUEUED.value, or_(deadline.is_(None), deadline > change.now))
                .order_by(conversions.c.priority.desc(), conversions.c.created, conversions.c.id)
                .limit(1)
                .with_for_update(skip_locked=True)
                .scalar_subquery()
            )
            values = {
                "fence": conversions.c.fence + 1,
                "attempt": conversions.c.attempt + 1,
                "started": func.coalesce(conversions.c.started, change.now),
                "lease_holder": self.holder,
                "lease_expires": change.now + self.lease_s,
            }
            row = move(change.connection, conversions.c.id == candidate, State.RUNNING, values)
            if row is None:
                return None
            change.append(row["id"], "state_changed", {"state": State.RUNNING.value})
            return Lease(row["id"], self.holder, row["fence"]), conversion_of(row)

    def renew(self, lease: Lease, *, run_seconds: float) -> State:
        """Extend the lease, note how long all attempts have run, and return the state. Raises LostLease."""
        with self._journal.change() as change:
            values = {"lease_expires": change.now + self.lease_s, "run_seconds": run_seconds}
            return State(hold(change, lease, values)["state"])

    def states(self, leases: Sequence[Lease]) -> dict[str, tuple[State, int]]:
        """State and fence number of each lease's conversion, in one look."""
        wanted = conversions.c.id.in_([lease.conversion for lease in leases])
        statement = select(conversions.c.id, conversions.c.state, conversions.c.fence).where(wanted)
        with self._journal.reading() as connection:
            return {row.id: (State(row.state), row.fence) for row in connection.execute(statement)}

    def finish(self, lease: Lease, result: Result) -> None:
        """SUCCEEDED, with the verdict, and the output can be downloaded: all or nothing.

        Raises LostLease, also where it was asked to cancel.
        """
        verdict, digest = {"verdict": result.verdict.value}, str(result.output.manifest.digest)
        values = {**verdict, "output": digest, "reused_from": result.reused_from, "failure": None}
        with self._journal.change() as change:
            row = self._end(change, lease, State.SUCCEEDED, values)
            record_artifact(change.connection, row["tenant"], result.output)
            change.append(lease.conversion, "state_changed", {"state": State.SUCCEEDED.value, **verdict})

    def fail(self, lease: Lease, failure: Failure) -> None:
        """FAILED, with the reason. Raises LostLease."""
        body = {"failure": failure.to_json()}
        with self._journal.change() as change:
            self._end(change, lease, State.FAILED, body)
            change.append(lease.conversion, "state_changed", {"state": State.FAILED.value, **body})

    def cancelled(self, lease: Lease) -> None:
        """CANCELLED: the worker has stopped. Raises LostLease."""
        with self._journal.change() as change:
            self._end(change, lease, State.CANCELLED, {})
            change.append(lease.conversion, "state_changed", {"state": State.CANCELLED.value})

    def requeue(self, lease: Lease, *, why: str, crashes: int = 0) -> None:
        """Give it back: QUEUED again, with a warning that says why. `crashes` are added to its count."""
        with self._journal.change() as change:
            self._requeue(change, held(lease), why, crashes)

    def release_dead(self, *, only_server: bool) -> int:
        """Requeue what a dead server left RUNNING and cancel what it left CANCELLING; return how many.

        A server is dead when its lease has expired; where this is the `only_server`, every other holder is.
        """
        with self._journal.change() as change:
            dead = conversions.c.lease_expires < change.now
            if only_server:
                dead = or_(dead, conversions.c.lease_holder != self.holder)
            leased = conversions.c.state.in_([state.value for state in LEASED])
            statement = select(conversions.c.id, conversions.c.fence, conversions.c.state).where(leased, dead)
            rows = change.connection.execute(statement.with_for_update(skip_locked=True)).all()
            for row in rows:
                which = and_(conversions.c.id == row.id, conversions.c.fence == row.fence)
                if row.state == State.CANCELLING.value:
                    move(change.connection, which, State.CANCELLED, {"ended": change.now})
                    change.append(row.id, "state_changed", {"state": State.CANCELLED.value})
                else:
                    why = "The server stopped while this was running; it goes on at the last finished step."
                    self._requeue(change, which, why, 0)
            return len(rows)

    def fail_overdue(self) -> int:
        """Fail what has waited longer than its queue timeout; return how many."""
        with self._journal.change() as change:
            overdue = and_(conversions.c.state == State.QUEUED.value, conversions.c.queue_deadline <= change.now)
            statement = select(conversions.c.id, conversions.c.request).where(overdue)
            rows = change.connection.execute(statement.with_for_update(skip_locked=True)).all()
            for row in rows:
                failure = {"failure": _waited_too_long(row.request["limits"]["queue_timeout_s"]).to_json()}
                move(change.connection, conversions.c.id == row.id, State.FAILED, {**failure, "ended": change.now})
                change.append(row.id, "state_changed", {"state": State.FAILED.value, **failure})
            return len(rows)

    def _end(self, change: Change, lease: Lease, target: State, values: Mapping[str, Any]) -> RowMapping:
        row = move(change.connection, held(lease), target, {**values, "ended": change.now})
        if row is None:
            raise _lost(lease)
        return row

    def _requeue(self, change: Change, which: ColumnElement[bool], why: str, crashes: int) -> None:
        request = change.connection.execute(select(conversions.c.request).where(which)).scalar_one_or_none()
        deadline = queue_deadline(request, change.now) if request else None
        values = {"queue_deadline": deadline, "crashes": conversions.c.crashes + crashes}
        row = move(change.connection, which, State.QUEUED, values)
        if row is None:
            raise LostLease("the conversion was taken over by another server or is being cancelled")
        change.append(row["id"], "warning", {"message": why})
        change.append(row["id"], "state_changed", {"state": State.QUEUED.value})


def held(lease: Lease) -> ColumnElement[bool]:
    """True for the lease's conversion until the lease ends: it was given back, the conversion ended, or another has it.

    The fence alone would not do: what was given back is QUEUED under the old fence until somebody claims it.
    """
    leased = conversions.c.state.in_([state.value for state in LEASED])
    return and_(conversions.c.id == lease.conversion, conversions.c.fence == lease.fence, leased)


def hold(change: Change, lease: Lease, values: Mapping[str, Any]) -> RowMapping:
    """Check the fence and lock the row until the change is committed; set `values`. Raises LostLease."""
    statement = (
        update(conversions).where(held(lease)).values({"fence": lease.fence, **values}).returning(*conversions.c)
    )
    row = change.connection.execute(statement).mappings().one_or_none()
    if row is None:
        raise _lost(lease)
    return row


def _lost(lease: Lease) -> LostLease:
    return LostLease(f"attempt {lease.fence} at conversion {lease.conversion!r} was taken over or is being cancelled")


def _waited_too_long(seconds: float) -> Failure:
    message = f"It waited longer than limits.queue_timeout ({seconds:g} s) for a free worker."
    return Failure(FailureKind.TIMED_OUT_IN_QUEUE, "QUEUE_TIMEOUT", message)
