"""The dispatcher: takes queued conversions, as many at once as it has slots, and watches what runs.

One thread looks around a few times a second, or as soon as it is woken; each attempt has a thread of its own.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from modelpress.errors import ModelpressError, Unavailable
from service import pipeline
from service.attempt import Attempt, AttemptLimits, Pipeline
from service.config import Config
from service.desk import Tools
from service.faults import fault_point
from service.plan import make_plan
from service.signing import Signer
from service.state.engine import is_sqlite
from service.state.events import Journal
from service.state.leases import Leases
from service.storage.store import ContentStore
from service.workers.pool import PoolSettings, WorkerPool
from service.workers.probe import probe
from service.workers.station import Stop

LOOK_EVERY_S = 0.2
"""Between two looks at the attempts: a cancel is seen within this time."""
EQUIP_S = 60.0
"""Longest wait for the workers' first start."""
TIDY_EVERY_S = 1.0
"""Between two looks for what waited too long, what dead servers left, and what others queued."""

MAIN_PATH = Pipeline(pipeline.run, lambda request: make_plan(request).step_names)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DispatcherSettings:
    """`slots` conversions at once; a lease lasts `lease_s` without a renewal."""

    slots: int
    lease_s: float
    limits: AttemptLimits


class Dispatcher:
    """`equip` makes the workers ready, which takes seconds, and returns what attempts work with."""

    def __init__(
        self,
        journal: Journal,
        equip: Callable[[], Tools],
        settings: DispatcherSettings,
        *,
        main_path: Pipeline = MAIN_PATH,
        on_failure: Callable[[ModelpressError], None],
    ) -> None:
        self._journal = journal
        self._equip = equip
        self._settings = settings
        self._main_path = main_path
        self._on_failure = on_failure
        self._leases = Leases(journal, holder=secrets.token_hex(8), lease_s=settings.lease_s)
        self._only_server = is_sqlite(journal.engine.url)
        self._tools: Tools | None = None
        self._equipped = threading.Event()
        self._attempts: list[Attempt] = []
        self._wake = threading.Event()
        self._draining = threading.Event()
        self._tidied = 0.0
        self._thread = threading.Thread(target=self._run, name="dispatcher", daemon=True)

    def start(self) -> None:
        """Take over what a dead server left, and begin to claim once the workers are ready. Returns at once.

        With 0 slots it only tidies up: this server queues, others compute.
        """
        self._thread.start()

    def tools(self) -> Tools | None:
        """What attempts work with, waited for; None where this server has no workers. Unavailable after a minute."""
        if self._settings.slots == 0:
            return None
        self._equipped.wait(EQUIP_S)
        if self._tools is None:
            raise Unavailable("the workers are still being started: try again in a few seconds")
        return self._tools

    def wake(self) -> None:
        """Look now: something was queued or is to be cancelled. Callable from any thread."""
        self._wake.set()

    def drain(self, grace_s: float) -> None:
        """Claim nothing more, stop every worker (its last checkpoint is kept), queue what ran again.

        Returns when that is done, or after `grace_s`: then the leases run out.
        """
        self._draining.set()
        self.wake()
        if self._thread.ident is None:
            return
        self._thread.join(grace_s)
        deadline = time.monotonic() + grace_s
        for attempt in self._attempts:
            if not attempt.ended:
                attempt.stop(Stop.DRAINED)
        while time.monotonic() < deadline and not all(attempt.ended for attempt in self._attempts):
            time.sleep(0.02)

    @property
    def running(self) -> int:
        """Attempts that have not ended."""
        return sum(not attempt.ended for attempt in self._attempts)

    def _run(self) -> None:
        self._guarded(self._take_over)
        if self._settings.slots:
            try:
                tools = self._equip()
            except ModelpressError as error:
                self._on_failure(error)
                return
            tools.pool.clear()
            self._tools = tools
            self._equipped.set()
        self.wake()
        while not self._draining.is_set():
            self._guarded(self._look)
            self._wake.wait(LOOK_EVERY_S)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # noqa: BLE001 - the database may be back at the next look
            _log.exception("the dispatcher failed; it looks again")
            self._draining.wait(TIDY_EVERY_S)

    def _take_over(self) -> None:
        released = self._leases.release_dead(only_server=self._only_server)
        if released:
            _log.info("took over from a server that stopped", extra={"fields": {"conversions": released}})

    def _look(self) -> None:
        woken = self._wake.is_set()
        self._wake.clear()
        running = [attempt for attempt in self._attempts if not attempt.ended]
        freed, self._attempts = len(running) < len(self._attempts), running
        states = self._leases.states([attempt.lease for attempt in self._attempts]) if self._attempts else {}
        for attempt in self._attempts:
            attempt.heed(*states[attempt.lease.conversion])
            attempt.watch()
        if woken or freed or time.monotonic() - self._tidied > TIDY_EVERY_S:
            self._tidied = time.monotonic()
            self._leases.fail_overdue()
            self._leases.release_dead(only_server=self._only_server)
            if self._tools is not None:
                self._claim(self._tools)

    def _claim(self, tools: Tools) -> None:
        """Fill the free slots."""
        while len(self._attempts) < self._settings.slots and not self._draining.is_set():
            fault_point("dispatcher.claim.before")
            claim = self._leases.claim()
            if claim is None:
                return
            fault_point("dispatcher.claim.after")
            attempt = Attempt(claim, tools, self._main_path, self._settings.limits, on_end=self.wake)
            attempt.start()
            self._attempts.append(attempt)


def open_dispatcher(
    config: Config,
    *,
    journal: Journal,
    store: ContentStore,
    signer: Signer,
    on_failure: Callable[[ModelpressError], None],
) -> Dispatcher:
    """The dispatcher of this configuration, not started. `on_failure` is told where workers could not do their work."""
    workers = config.workers

    def equip() -> Tools:
        pool = WorkerPool(PoolSettings(config.store_url, config.scratch, config.worker_threads, workers.device))
        facts = probe(pool)
        _log.warning("workers are ready", extra={"fields": {"isolation": facts.environment.isolation}})
        return Tools(journal, store, signer, pool, facts)

    limits = AttemptLimits(
        run_timeout_s=config.limits.run_timeout_s,
        memory_limit_bytes=config.worker_memory_bytes,
        max_attempts=workers.max_attempts,
        renew_every_s=workers.lease_s / 3,
    )
    settings = DispatcherSettings(workers.slots, workers.lease_s, limits)
    return Dispatcher(journal, equip, settings, on_failure=on_failure)
