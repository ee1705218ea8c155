"""One attempt at one conversion: the pipeline in a thread, watched from outside, and what becomes of it.

The attempt's own thread ends it where the pipeline returns or raises; `stop`, called by the dispatcher, ends it
earlier. Both write the outcome under the attempt's lease, so only the first of two can.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from modelpress.errors import ModelpressError
from modelpress.manifests import ArtifactKind
from service.desk import ClaimedConversion, Desk, Seat, Tools
from service.failures import Failure, FailureKind, OutOfMemory, failure_of
from service.faults import fault_point
from service.logs import conversion_context
from service.publication import Publication
from service.requests import ConversionRequest
from service.state.artifacts import Artifact
from service.state.conversions import Conversion
from service.state.leases import Lease, Leases, Result
from service.state.states import LostLease, State
from service.storage.checkpoints import Checkpoints
from service.workers.limits import NEAR
from service.workers.pool import Worker, WorkerDied
from service.workers.station import Station, Stop, Stopped

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pipeline:
    """What an attempt runs, and the names of the steps that it will run for a request."""

    run: Callable[[Desk], Publication]
    step_names: Callable[[ConversionRequest], tuple[str, ...]]


@dataclass(frozen=True)
class AttemptLimits:
    """What holds where the request sets nothing, and how often a conversion is tried when its worker dies."""

    run_timeout_s: float
    memory_limit_bytes: int
    max_attempts: int
    renew_every_s: float


class Attempt:
    """`on_end` is called once its slot is free, so that what waits in the queue starts at once."""

    def __init__(
        self,
        claim: tuple[Lease, Conversion],
        tools: Tools,
        pipeline: Pipeline,
        limits: AttemptLimits,
        *,
        on_end: Callable[[], None],
    ) -> None:
        self.lease, self._conversion = claim
        self._tools = tools
        self._pipeline = pipeline
        self._limits = limits
        self._leases = Leases(tools.journal, holder=self.lease.holder, lease_s=limits.renew_every_s * 3)
        self._start = self._renewed = time.monotonic()
        self._station = Station(self._open_worker)
        self._desk: Desk | None = None
        self._stopping: threading.Thread | None = None
        self._on_end = on_end
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"attempt-{self.lease.conversion}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def ended(self) -> bool:
        """True when its outcome is written and its worker and scratch folder are gone."""
        return self._over.is_set() and not (self._stopping and self._stopping.is_alive())

    def watch(self) -> None:
        """Renew the lease and enforce the limits; called a few times a second."""
        if self._stopping:
            return
        if time.monotonic() - self._renewed >= self._limits.renew_every_s:
            self._renew()
        if self._run_seconds() > self._run_timeout_s:
            self.stop(Stop.TIMED_OUT)
        elif self._station.memory_bytes() > self._memory_limit_bytes:
            self.stop(Stop.OUT_OF_MEMORY)

    def heed(self, state: State, fence: int) -> None:
        """Stop where the database says that it should: a cancel was asked for, or the lease is another's."""
        if fence != self.lease.fence:
            self.stop(Stop.LOST)
        elif state is State.CANCELLING:
            self.stop(Stop.CANCELLED)

    def stop(self, cause: Stop) -> None:
        """End it from outside, within two seconds; the first cause counts. Returns at once."""
        if self._stopping is None:
            self._stopping = threading.Thread(target=self._halt, args=(cause,), daemon=True)
            self._stopping.start()

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._over.set()
            self._on_end()

    def _work(self) -> None:
        with conversion_context(self.lease.conversion):
            try:
                result = self._result(self._pipeline.run(self._seated()))
                self._settle(partial(self._finish, result))
            except Stopped:
                _log.info("attempt stopped", extra={"fields": {"attempt": self._conversion.attempt}})
            except Exception as error:  # noqa: BLE001 - whatever it was, the conversion must not stay RUNNING
                self._settle(partial(self._fail, error))
            finally:
                self._station.close()

    def _seated(self) -> Desk:
        found = self._conversion
        request = ConversionRequest.from_json(found.request)
        started = found.started or found.created
        who = (found.id, found.tenant, found.requested_by)
        conversion = ClaimedConversion(*who, request, found.attempt, found.created, started)
        seat = Seat(self.lease, self._station, self._memory_limit_bytes, self._pipeline.step_names(request))
        self._desk = Desk(conversion, seat, self._tools)
        return self._desk

    def _result(self, publication: Publication) -> Result:
        self._station.check()
        manifest = self._tools.store.manifest(publication.output)
        output = Artifact(ArtifactKind.REPORT, manifest, {}, self._tools.journal.clock())
        return Result(output, publication.verdict, publication.reused_from)

    def _settle(self, write: Callable[[], None]) -> None:
        """Write an outcome. Where a cancel was asked for just before, that is the outcome.

        Where the lease is another's, or even this fails, nothing is written: a lease that runs out is requeued.
        """
        try:
            try:
                write()
            except LostLease:
                self._leases.cancelled(self.lease)
        except LostLease as error:
            _log.warning("attempt lost its lease", extra={"fields": {"why": error.message}})
        except Exception:  # noqa: BLE001 - the thread must end in order
            _log.exception("the outcome of an attempt could not be written")

    def _finish(self, result: Result) -> None:
        fault_point("attempt.finish.before")
        self._leases.finish(self.lease, result)
        fault_point("attempt.finish.after")
        _log.info("conversion finished", extra={"fields": {"verdict": result.verdict.value}})
        settings = self._tools.pool.settings
        Checkpoints(settings.store_url, self.lease.conversion, scratch=settings.scratch).clear()

    def _fail(self, error: Exception) -> None:
        if isinstance(error, WorkerDied) and not self._died_of_memory():
            self._worker_died(error)
        else:
            self._leases.fail(self.lease, self._failure(error))

    def _failure(self, error: Exception) -> Failure:
        if isinstance(error, WorkerDied):
            error = OutOfMemory(self._memory_limit_bytes)
        if isinstance(error, ModelpressError):
            return failure_of(error, step=self._step)
        identifier = secrets.token_hex(8)
        _log.error("attempt failed", exc_info=error, extra={"fields": {"error_id": identifier}})
        message = f"the server failed; its log has the cause under {identifier}: report that id to its operator"
        return Failure(FailureKind.INTERNAL, "INTERNAL", message, self._step)

    def _died_of_memory(self) -> bool:
        """A process that dies with its memory all but used up has died of it: C++ aborts where Python would raise."""
        return self._station.most_memory_bytes > NEAR * self._memory_limit_bytes

    def _worker_died(self, error: WorkerDied) -> None:
        """Queue it again, unless it happened too often since the last finished step."""
        finished = self._desk.finished if self._desk else 0
        tried = (0 if finished else self._conversion.crashes) + 1
        where = f"the worker process {error.cause} in {self._step or 'its start'}"
        if tried < self._limits.max_attempts:
            why = f"Attempt {tried} of {self._limits.max_attempts}: {where}. It is queued again and resumes there."
            self._leases.requeue(self.lease, why=why, crashes=1)
            return
        message = f"{where}, {tried} times in a row"
        self._leases.fail(self.lease, Failure(FailureKind.INTERNAL, error.reason, message, self._step))

    def _halt(self, cause: Stop) -> None:
        """End the worker, then write the outcome, without waiting for the pipeline's thread to notice."""
        with conversion_context(self.lease.conversion):
            _log.info("stopping", extra={"fields": {"cause": cause.value}})
            self._station.stop(cause)
            self._settle(partial(_OUTCOMES[cause], self))

    def _cancelled(self) -> None:
        self._leases.cancelled(self.lease)

    def _drained(self) -> None:
        self._leases.requeue(self.lease, why="The server is stopping; it goes on when one is there again.")

    def _timed_out(self) -> None:
        message = f"it ran longer than limits.run_timeout ({self._run_timeout_s:g} s), all attempts together"
        self._leases.fail(self.lease, Failure(FailureKind.TIMED_OUT_RUNNING, "RUN_TIMEOUT", message, self._step))

    def _out_of_memory(self) -> None:
        self._leases.fail(self.lease, failure_of(OutOfMemory(self._memory_limit_bytes), step=self._step))

    def _lost(self) -> None:
        """Nothing to write: it is another's now."""

    def _renew(self) -> None:
        self._renewed = time.monotonic()
        try:
            state = self._leases.renew(self.lease, run_seconds=self._run_seconds())
        except LostLease:
            self.stop(Stop.LOST)
        else:
            self.heed(state, self.lease.fence)

    def _open_worker(self) -> Worker:
        return self._tools.pool.open(
            self.lease.conversion,
            attempt=self._conversion.attempt,
            device=self._tools.facts.device,
            memory_limit_bytes=self._memory_limit_bytes,
        )

    def _run_seconds(self) -> float:
        """Of all attempts together."""
        return self._conversion.run_seconds + time.monotonic() - self._start

    @property
    def _step(self) -> str:
        return self._desk.current_step if self._desk else ""

    @property
    def _run_timeout_s(self) -> float:
        asked = self._conversion.request["limits"]["run_timeout_s"]
        return float(self._limits.run_timeout_s if asked is None else asked)

    @property
    def _memory_limit_bytes(self) -> int:
        asked = self._conversion.request["limits"]["memory_limit_bytes"]
        return int(self._limits.memory_limit_bytes if asked is None else asked)


_OUTCOMES: Mapping[Stop, Callable[[Attempt], None]] = {
    Stop.CANCELLED: Attempt._cancelled,
    Stop.DRAINED: Attempt._drained,
    Stop.TIMED_OUT: Attempt._timed_out,
    Stop.OUT_OF_MEMORY: Attempt._out_of_memory,
    Stop.LOST: Attempt._lost,
}
