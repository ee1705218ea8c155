"""The desk: what the pipeline is given for one attempt at one conversion.

    result = desk.run(step)     # finished earlier, else from the cache, else computed by the worker

Whatever `run` returns is durable: in the store, and noted in the database under the attempt's lease.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelpress import errors
from modelpress.digests import Digest
from modelpress.errors import InternalError, ModelpressError
from modelpress.reports import Environment
from service.failures import OutOfMemory
from service.faults import fault_point
from service.progress import Position, ProgressTeller
from service.requests import ConversionRequest
from service.signing import Signer
from service.state.events import Journal
from service.state.leases import Lease
from service.state.steps import StepKey, Steps
from service.steps import Step, StepResult
from service.storage.checkpoints import Checkpoints, is_whole
from service.storage.store import ContentStore
from service.workers.pool import Listener, WorkerDied, WorkerPool
from service.workers.probe import WorkerFacts
from service.workers.station import Station

ERRORS: Mapping[str, type[ModelpressError]] = {
    kind.__name__: kind
    for kind in (
        errors.InvalidRequest,
        errors.InvalidRecipe,
        errors.InvalidPolicy,
        errors.InvalidDataset,
        errors.InvalidModel,
        errors.DigestMismatch,
        errors.NotFound,
        errors.FailedPrecondition,
        errors.OverLimit,
        errors.Unavailable,
        errors.DataLoss,
    )
}
"""What a worker may say went wrong; anything else is our fault."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClaimedConversion:
    """A conversion as its attempt sees it. Times are UTC seconds since the epoch."""

    id: str
    tenant: str
    requested_by: str
    request: ConversionRequest
    attempt: int
    created: float
    started: float


@dataclass(frozen=True)
class Tools:
    """What every attempt of a server works with."""

    journal: Journal
    store: ContentStore
    signer: Signer
    pool: WorkerPool
    facts: WorkerFacts

    @property
    def steps(self) -> Steps:
        return Steps(self.journal)


@dataclass(frozen=True)
class Seat:
    """What one attempt has of its own: its lease, its worker, its memory limit and its plan's steps."""

    lease: Lease
    station: Station
    memory_limit_bytes: int
    step_names: tuple[str, ...]


class Desk:
    def __init__(self, conversion: ClaimedConversion, seat: Seat, tools: Tools) -> None:
        self.conversion = conversion
        self.store = tools.store
        self.signer = tools.signer
        self.environment: Environment = tools.facts.environment
        self.scratch = tools.pool.scratch
        """Local folder for working copies; what a killed server left in it is deleted at the next start."""
        self.current_step = ""
        """The step that runs, for whoever has to say where it failed."""
        self.finished = 0
        """Steps that this attempt has finished."""
        self._seat = seat
        self._tools = tools
        self._steps = tools.steps
        self._results: list[StepResult] = []

    def run(self, step: Step) -> StepResult:
        """The step's result: what an earlier attempt finished, else the cache's, else the worker's.

        Raises what the operation raised, WorkerDied, Stopped, LostLease.
        """
        key = self._enter(step)
        return self._keep(self._known(key) or self._reused(key) or self._computed(step, key))

    def run_paired(self, step: Step) -> StepResult:
        """As `run`, but another conversion's result only where every step so far came from the cache."""
        if self.all_cached:
            return self.run(step)
        key = self._enter(step)
        return self._keep(self._known(key) or self._computed(step, key))

    @property
    def memory_limit_bytes(self) -> int:
        """The worker's: what the request asks for, else the server's own."""
        return self._seat.memory_limit_bytes

    def warn(self, sentence: str) -> None:
        """Tell watchers something that a person should know."""
        self._steps.warn(self._seat.lease, sentence)

    def now(self) -> float:
        """UTC seconds since the epoch."""
        return self._tools.journal.clock()

    @property
    def all_cached(self) -> bool:
        """True while every step so far came from the cache."""
        return all(result.cached for result in self._results)

    @property
    def reused_from(self) -> str | None:
        """The conversion that measured the newest step, where every step came from the cache."""
        return self._results[-1].measured_by if self._results and self.all_cached else None

    def _enter(self, step: Step) -> StepKey:
        self._seat.station.check()
        self.current_step = step.name
        return StepKey(step.name, step.key(self._tools.facts.key_environment(step)))

    def _keep(self, result: StepResult) -> StepResult:
        self._results.append(result)
        return result

    def _known(self, key: StepKey) -> StepResult | None:
        """What this conversion has finished already; watchers were told then."""
        found = self._steps.finished(self.conversion.id, key)
        return found if found and self._is_whole(key, found) else None

    def _reused(self, key: StepKey) -> StepResult | None:
        found = self._steps.cached(self.conversion.tenant, key.key)
        if found is None or not self._is_whole(key, found):
            return None
        self._steps.start(self._seat.lease, self._position(key.name).to_json())
        return self._finish(key, found)

    def _computed(self, step: Step, key: StepKey) -> StepResult:
        self._steps.start(self._seat.lease, self._position(step.name).to_json())
        teller = ProgressTeller(self._position(step.name))
        listener = Listener(
            progress=lambda body: self._steps.progress(self._seat.lease, teller.told(body)),
            checkpoint=lambda digest: self._note_checkpoint(key, digest),
        )
        try:
            worker = self._seat.station.worker()
            _log.info(
                "step runs", extra={"fields": {"step": step.name, "queued_s": self.now() - self.conversion.created}}
            )
            answer = worker.run(step, self._checkpoint(key), listener)
        except WorkerDied:
            self._seat.station.check()
            raise
        if answer.kind == "failed":
            raise self._error(answer.body)
        digest = Digest(answer.body["digest"]) if answer.body["digest"] else None
        return self._finish(key, StepResult(digest, answer.body["record"], answer.body["seconds"], self.conversion.id))

    def _finish(self, key: StepKey, result: StepResult) -> StepResult:
        fault_point("desk.step.before")
        self._steps.finish(self._seat.lease, key, result)
        fault_point("desk.step.after")
        self.finished += 1
        self._checkpoints().clear()
        return result

    def _note_checkpoint(self, key: StepKey, digest: Digest) -> None:
        fault_point("desk.checkpoint.before")
        former = self._steps.save_checkpoint(self._seat.lease, key, digest)
        fault_point("desk.checkpoint.after")
        if former:
            self._checkpoints().replace(former, digest)

    def _checkpoint(self, key: StepKey) -> Digest | None:
        """The newest checkpoint of this very step; a warning where one was noted and its bytes are gone."""
        digest = self._steps.checkpoint(self.conversion.id, key)
        if digest and not self._checkpoints().has(digest):
            self.warn(f"The checkpoint of {key.name} is no longer in the store: the step starts from its beginning.")
            return None
        return digest

    def _checkpoints(self) -> Checkpoints:
        settings = self._tools.pool.settings
        return Checkpoints(settings.store_url, self.conversion.id, scratch=settings.scratch)

    def _is_whole(self, key: StepKey, result: StepResult) -> bool:
        """Whether the store still has what the step wrote; a warning where it does not."""
        named = [result.digest, Digest(result.record["evidence"]) if "evidence" in result.record else None]
        if all(is_whole(self.store, digest) for digest in named if digest):
            return True
        self.warn(f"The kept result of {key.name} is no longer in the store: it is computed again.")
        return False

    def _position(self, name: str) -> Position:
        names = self._seat.step_names
        return Position(name, names.index(name) + 1 if name in names else 0, len(names))

    def _error(self, body: Mapping[str, Any]) -> ModelpressError:
        """The error that a worker told of; what it did not raise on purpose is only logged, under an opaque id."""
        if body["error"] == "OutOfMemory":
            return OutOfMemory(self._seat.memory_limit_bytes)
        if kind := ERRORS.get(body["error"]):
            return kind(body["message"], reason=body["reason"], field=body["field"])
        identifier = secrets.token_hex(8)
        text = body.get("traceback") or body.get("message")
        _log.error("a step failed", extra={"fields": {"step": self.current_step, "error_id": identifier, "text": text}})
        return InternalError(
            f"the server failed in this step; its log has the cause under {identifier}: report that id to its operator",
            metadata={"error_id": identifier},
        )
