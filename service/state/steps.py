"""Finished steps, the cache across conversions, and the newest checkpoint of a running step.

Every write names its lease and is refused with LostLease where another attempt has taken over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import RowMapping, delete, select

from modelpress.digests import Digest
from service.progress import figures_of
from service.state.engine import upsert
from service.state.events import Change, Journal
from service.state.leases import Lease, hold
from service.state.tables import cache, checkpoints, steps
from service.steps import StepResult


@dataclass(frozen=True)
class StepKey:
    """A step of a conversion with the key that names its result."""

    name: str
    key: Digest


class Steps:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def finished(self, conversion: str, step: StepKey) -> StepResult | None:
        """The result that an earlier attempt at this conversion left under the same key."""
        which = (steps.c.conversion == conversion, steps.c.name == step.name, steps.c.key == str(step.key))
        with self._journal.reading() as connection:
            row = connection.execute(select(steps).where(*which)).mappings().one_or_none()
        return _result(row, cached=row["cached"]) if row else None

    def cached(self, tenant: str, key: Digest) -> StepResult | None:
        """The result that any conversion of this tenant left under the key."""
        which = (cache.c.tenant == tenant, cache.c.key == str(key))
        with self._journal.reading() as connection:
            row = connection.execute(select(cache).where(*which)).mappings().one_or_none()
        return _result(row, cached=True) if row else None

    def start(self, lease: Lease, body: Mapping[str, Any]) -> None:
        """Tell that a step started."""
        with self._journal.change() as change:
            hold(change, lease, {"progress": dict(body)})
            change.append(lease.conversion, "step_started", body)

    def progress(self, lease: Lease, body: Mapping[str, Any]) -> None:
        """Tell how far a step is."""
        with self._journal.change() as change:
            hold(change, lease, {"progress": dict(body)})
            change.progress(lease.conversion, body)

    def warn(self, lease: Lease, message: str) -> None:
        with self._journal.change() as change:
            hold(change, lease, {})
            change.append(lease.conversion, "warning", {"message": message})

    def finish(self, lease: Lease, step: StepKey, result: StepResult) -> None:
        """Keep the result for this conversion and for others, and drop the step's checkpoint: all or nothing."""
        with self._journal.change() as change:
            row = hold(change, lease, {"crashes": 0})
            values = _values(step.key, result, change.now)
            upsert(
                change.connection,
                steps,
                {"conversion": lease.conversion, "name": step.name},
                {**values, "cached": result.cached},
            )
            if not result.cached:
                upsert(change.connection, cache, {"tenant": row["tenant"], "key": str(step.key)}, values)
            _delete_checkpoint(change, lease.conversion, step.name)
            change.append(lease.conversion, "step_finished", _told(step.name, result))

    def checkpoint(self, conversion: str, step: StepKey) -> Digest | None:
        """The manifest of the newest checkpoint of exactly this step: same name and same key."""
        which = (checkpoints.c.conversion == conversion, checkpoints.c.step == step.name)
        statement = select(checkpoints.c.digest).where(*which, checkpoints.c.key == str(step.key))
        with self._journal.reading() as connection:
            digest = connection.execute(statement).scalar_one_or_none()
        return Digest(digest) if digest else None

    def save_checkpoint(self, lease: Lease, step: StepKey, digest: Digest) -> Digest | None:
        """Make `digest` the step's newest checkpoint and return the former one, whose blobs may be deleted now."""
        which = (checkpoints.c.conversion == lease.conversion, checkpoints.c.step == step.name)
        with self._journal.change() as change:
            hold(change, lease, {})
            former = change.connection.execute(select(checkpoints.c.digest).where(*which)).scalar_one_or_none()
            upsert(
                change.connection,
                checkpoints,
                {"conversion": lease.conversion, "step": step.name},
                {"key": str(step.key), "digest": str(digest), "created": change.now},
            )
        return Digest(former) if former else None


def _result(row: RowMapping, *, cached: bool) -> StepResult:
    digest = Digest(row["digest"]) if row["digest"] else None
    return StepResult(digest, row["record"], row["seconds"], row["measured_by"], cached)


def _values(key: Digest, result: StepResult, now: float) -> dict[str, Any]:
    return {
        "key": str(key),
        "digest": str(result.digest) if result.digest else None,
        "record": dict(result.record),
        "seconds": result.seconds,
        "measured_by": result.measured_by,
        "created": now,
    }


def _told(name: str, result: StepResult) -> dict[str, Any]:
    """What a watcher is told of a finished step: a few figures, not the whole record."""
    return {
        "step": name,
        "seconds": 0.0 if result.cached else result.seconds,
        "cached": result.cached,
        "digest": str(result.digest) if result.digest else "",
        "figures": figures_of(result.record),
    }


def _delete_checkpoint(change: Change, conversion: str, step: str) -> None:
    which = (checkpoints.c.conversion == conversion, checkpoints.c.step == step)
    change.connection.execute(delete(checkpoints).where(*which))
