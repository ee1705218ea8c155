"""A real dispatcher with real worker processes, tiny operations and a pipeline that a test writes in three lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelpress.digests import Digest
from modelpress.errors import ModelpressError
from modelpress.reports import Verdict
from service.attempt import AttemptLimits, Pipeline
from service.desk import Desk, Tools
from service.dispatcher import Dispatcher, DispatcherSettings
from service.publication import Publication
from service.signing import load_or_create_signer
from service.state.conversions import Conversion, Conversions
from service.state.engine import open_database
from service.state.events import Event, Journal
from service.state.states import FINAL, State
from service.steps import Step
from service.storage.store import ContentStore
from service.workers.pool import PoolSettings, WorkerPool
from service.workers.probe import WorkerFacts
from tests.service.jobs.tiny_operations import operations

MEMORY_LIMIT_BYTES = 4 << 30
STEPS = ("first", "second", "third")


def step(name: str, operation: str, inputs: Mapping[str, Digest] | None = None, **arguments: Any) -> Step:
    return Step(name, operation, arguments, inputs or {}, seed=1)


def publish_text(desk: Desk, text: str) -> Publication:
    """A minimal output folder: one file."""
    folder = desk.store.staging / f"text-{desk.conversion.id}"
    folder.mkdir(exist_ok=True)
    (folder / "report.json").write_text(text)
    output = desk.store.put_folder(folder).digest
    (folder / "report.json").unlink()
    folder.rmdir()
    return Publication(output, Verdict.APPROVED, desk.reused_from)


@dataclass
class Workshop:
    """A server without its edge, on one data folder. `pipeline` is what its conversions run."""

    data: Path
    facts: WorkerFacts
    pipeline: Callable[[Desk], Publication]
    slots: int = 2
    run_timeout_s: float = 60.0
    memory_limit_bytes: int = MEMORY_LIMIT_BYTES

    def __post_init__(self) -> None:
        self.engine = open_database(f"sqlite:///{self.data}/state.sqlite")
        self.journal = Journal(self.engine)
        self.conversions = Conversions(self.journal)
        scratch = self.data / "scratch"
        self.store = ContentStore(str(self.data / "store"), scratch=scratch)
        pool = WorkerPool(PoolSettings(str(self.data / "store"), scratch, 1, "cpu", operations))
        limits = AttemptLimits(self.run_timeout_s, self.memory_limit_bytes, max_attempts=3, renew_every_s=5.0)
        signer = load_or_create_signer(self.data, None)
        self.tools = Tools(self.journal, self.store, signer, pool, self.facts)
        settings = DispatcherSettings(self.slots, 15.0, limits)
        path = Pipeline(self._run, lambda request: STEPS)
        self.failures: list[ModelpressError] = []
        self.dispatcher = Dispatcher(
            self.journal, lambda: self.tools, settings, main_path=path, on_failure=self.failures.append
        )
        self.dispatcher.start()

    def _run(self, desk: Desk) -> Publication:
        return self.pipeline(desk)

    def close(self) -> None:
        self.dispatcher.drain(10.0)
        self.engine.dispose()

    def wait(self, conversion: Conversion, *states: State, seconds: float = 30.0) -> Conversion:
        """The conversion once it is in one of the states (default: a final one)."""
        self.dispatcher.wake()
        deadline = time.monotonic() + seconds
        while (found := self.conversions.get("default", conversion.id)).state not in (states or FINAL):
            assert time.monotonic() < deadline, f"still {found.state}, {self.told(conversion)}"
            time.sleep(0.01)
        return found

    def told(self, conversion: Conversion) -> list[tuple[str, Mapping[str, Any]]]:
        return [(event.kind, event.body) for event in self.events(conversion)]

    def events(self, conversion: Conversion) -> list[Event]:
        return self.journal.events_after(conversion.id, 0, seen=0)

    def wait_for_event(self, conversion: Conversion, kind: str, seconds: float = 20.0) -> Event:
        deadline = time.monotonic() + seconds
        while True:
            found = [event for event in self.events(conversion) if event.kind == kind]
            if found:
                return found[-1]
            assert time.monotonic() < deadline, f"no {kind} in {self.told(conversion)}"
            time.sleep(0.01)

    def leftovers(self) -> list[str]:
        """What lies in the workers' scratch folder once nothing runs any more."""
        deadline = time.monotonic() + 10
        while self.dispatcher.running and time.monotonic() < deadline:
            time.sleep(0.01)
        folder = self.tools.pool.scratch
        return sorted(file.name for file in folder.iterdir()) if folder.exists() else []
