"""Conversions as their owners see them: create, get, list, cancel, retry.

What a dispatcher does with one (claim, renew, finish) stands in `service.state.leases`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, RowMapping, Select, and_, exists, insert, or_, select
from sqlalchemy.exc import IntegrityError

from modelpress.canonical import canonical_json
from modelpress.digests import Digest, digest_bytes
from modelpress.errors import AlreadyExists, Conflict, FailedPrecondition, NotFound
from modelpress.reports import Verdict
from service.faults import fault_point
from service.state.events import Change, Journal
from service.state.states import FINAL, State, move
from service.state.tables import conversion_labels, conversions


@dataclass(frozen=True)
class Conversion:
    """A row of `conversions`. Times are UTC seconds since the epoch."""

    id: str
    tenant: str
    requested_by: str
    request: Mapping[str, Any]
    state: State
    priority: int
    created: float
    started: float | None
    ended: float | None
    run_seconds: float
    attempt: int
    crashes: int
    version: int
    fence: int
    failure: Mapping[str, str] | None
    verdict: Verdict | None
    output: Digest | None
    reused_from: str | None
    progress: Mapping[str, Any] | None
    last_sequence: int

    @property
    def etag(self) -> str:
        """Changes with every change of the conversion's state, attempt or result."""
        return str(self.version)

    @property
    def ended_for_now(self) -> bool:
        return self.state in FINAL


@dataclass(frozen=True)
class NewConversion:
    """`request` as canonical JSON values; `labels` and `queue_timeout_s` are copies of what stands in it."""

    tenant: str
    requested_by: str
    request: Mapping[str, Any]
    request_id: str = ""

    @property
    def digest(self) -> Digest:
        return digest_bytes(canonical_json(dict(self.request)))


@dataclass(frozen=True)
class Filter:
    """Empty fields let everything through. `labels`: all of them must match."""

    states: tuple[State, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


class Conversions:
    """Every method reads or writes one tenant's conversions only; another tenant's do not exist for it."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def create(self, new: NewConversion) -> Conversion:
        """Queue a conversion. The same `request_id` with the same request returns the one that is there.

        Raises AlreadyExists where the `request_id` was used with another request.
        """
        fault_point("conversion.create.before")
        try:
            with self._journal.change() as change:
                created = self._insert(change, new)
        except IntegrityError:
            return self._existing(new)
        fault_point("conversion.create.after")
        return created

    def get(self, tenant: str, conversion: str) -> Conversion:
        """Raises NotFound."""
        with self._journal.reading() as connection:
            row = connection.execute(select(conversions).where(_is(tenant, conversion))).mappings().one_or_none()
        if row is None:
            raise NotFound(
                f"there is no conversion {conversion[:64]!r}: list them (`modelpress list`, ListConversions)",
                field="name",
            )
        return conversion_of(row)

    def page(self, tenant: str, *, only: Filter, after: tuple[float, str] | None, limit: int) -> list[Conversion]:
        """At most `limit` conversions, newest first, beginning after (created, id) of the former page's last one."""
        statement = _filtered(tenant, only).order_by(conversions.c.created.desc(), conversions.c.id.desc())
        if after is not None:
            created, last = after
            tie = and_(conversions.c.created == created, conversions.c.id < last)
            statement = statement.where(or_(conversions.c.created < created, tie))
        with self._journal.reading() as connection:
            return [conversion_of(row) for row in connection.execute(statement.limit(limit)).mappings()]

    def cancel(self, tenant: str, conversion: str, *, etag: str = "") -> Conversion:
        """Ask for a stop: a queued one is CANCELLED at once, a running one CANCELLING until its worker has stopped.

        Cancelling twice is the same as once. Raises FailedPrecondition where it has ended, Conflict for an old etag.
        """
        with self._journal.change() as change:
            found = self._lock(change, tenant, conversion, etag)
            if found.state in (State.CANCELLING, State.CANCELLED):
                return found
            if found.ended_for_now:
                raise FailedPrecondition(
                    f"conversion {conversion!r} has {found.state.value} already: nothing is left to cancel"
                )
            target, ended = (State.CANCELLED, change.now) if found.state is State.QUEUED else (State.CANCELLING, None)
            return self._moved(change, found, target, {"ended": ended})

    def retry(self, tenant: str, conversion: str, *, etag: str = "") -> Conversion:
        """Queue a failed or cancelled conversion again; its finished steps and its last checkpoint are kept.

        Raises FailedPrecondition in another state, Conflict for an old etag.
        """
        with self._journal.change() as change:
            found = self._lock(change, tenant, conversion, etag)
            if found.state not in (State.FAILED, State.CANCELLED):
                raise FailedPrecondition(
                    f"conversion {conversion!r} is {found.state.value}: only a FAILED or CANCELLED one can be retried"
                )
            fresh = {"failure": None, "ended": None, "run_seconds": 0.0, "crashes": 0}
            deadline = queue_deadline(found.request, change.now)
            return self._moved(change, found, State.QUEUED, {**fresh, "queue_deadline": deadline})

    def _insert(self, change: Change, new: NewConversion) -> Conversion:
        values = {
            "id": secrets.token_hex(10),
            "tenant": new.tenant,
            "requested_by": new.requested_by,
            "request_id": new.request_id or None,
            "request": dict(new.request),
            "request_digest": str(new.digest),
            "state": State.QUEUED.value,
            "priority": new.request["priority"],
            "created": change.now,
            "queue_deadline": queue_deadline(new.request, change.now),
            **dict.fromkeys(("run_seconds", "attempt", "crashes", "fence", "last_sequence"), 0),
            "version": 1,
        }
        row = change.connection.execute(insert(conversions).values(values).returning(*conversions.c)).mappings().one()
        labels = [{"conversion": values["id"], "key": k, "value": v} for k, v in new.request["labels"].items()]
        if labels:
            change.connection.execute(insert(conversion_labels), labels)
        sequence = change.append(values["id"], "state_changed", {"state": State.QUEUED.value})
        return conversion_of({**row, "last_sequence": sequence})

    def _existing(self, new: NewConversion) -> Conversion:
        which = and_(conversions.c.tenant == new.tenant, conversions.c.request_id == new.request_id)
        with self._journal.reading() as connection:
            row = connection.execute(select(conversions).where(which)).mappings().one()
        if row["request_digest"] != str(new.digest):
            raise AlreadyExists(
                f"request_id {new.request_id!r} was used for another request: use a new one, or send the same request",
                field="request_id",
                metadata={"conversion": f"conversions/{row['id']}"},
            )
        return conversion_of(row)

    def _lock(self, change: Change, tenant: str, conversion: str, etag: str) -> Conversion:
        """The row, locked until the change is committed (SQLite: by the transaction itself)."""
        statement = select(conversions).where(_is(tenant, conversion)).with_for_update()
        row = change.connection.execute(statement).mappings().one_or_none()
        if row is None:
            raise NotFound(
                f"there is no conversion {conversion[:64]!r}: list them (`modelpress list`, ListConversions)",
                field="name",
            )
        found = conversion_of(row)
        if etag and etag != found.etag:
            raise Conflict(
                f"conversion {conversion!r} has changed: its etag is {found.etag!r}, not {etag[:64]!r}", field="etag"
            )
        return found

    def _moved(self, change: Change, found: Conversion, target: State, values: Mapping[str, Any]) -> Conversion:
        row = move(change.connection, conversions.c.id == found.id, target, values)
        if row is None:
            raise Conflict(f"conversion {found.id!r} changed at the same moment: read it again")
        sequence = change.append(found.id, "state_changed", {"state": target.value})
        return conversion_of({**row, "last_sequence": sequence})


def conversion_of(row: RowMapping | Mapping[str, Any]) -> Conversion:
    """The value of a row of the table `conversions`."""
    values = {name: row[name] for name in Conversion.__dataclass_fields__}
    values["state"] = State(row["state"])
    values["verdict"] = Verdict(row["verdict"]) if row["verdict"] else None
    values["output"] = Digest(row["output"]) if row["output"] else None
    return Conversion(**values)


def queue_deadline(request: Mapping[str, Any], now: float) -> float | None:
    """When a conversion that is queued now has waited too long; None: never."""
    seconds = request["limits"]["queue_timeout_s"]
    return None if seconds is None else now + seconds


def _is(tenant: str, conversion: str) -> ColumnElement[bool]:
    return and_(conversions.c.tenant == tenant, conversions.c.id == conversion)


def _filtered(tenant: str, only: Filter) -> Select[Any]:
    statement = select(conversions).where(conversions.c.tenant == tenant)
    if only.states:
        statement = statement.where(conversions.c.state.in_([state.value for state in only.states]))
    if only.verdicts:
        statement = statement.where(conversions.c.verdict.in_([verdict.value for verdict in only.verdicts]))
    for key, value in only.labels.items():
        label = and_(
            conversion_labels.c.conversion == conversions.c.id,
            conversion_labels.c.key == key,
            conversion_labels.c.value == value,
        )
        statement = statement.where(exists().where(label))
    return statement
