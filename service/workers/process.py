"""The worker process of one conversion: it runs one step after the other and stores what each leaves.

It is forked from the preloaded forkserver, has a session, a scratch folder and limits of its own, and ends with the
pipe to the service. It reads and writes the content store; it has no database and no key.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from compressors.stages import Progress
from modelpress.digests import Digest
from modelpress.errors import InternalError, ModelpressError
from service.faults import fault_point
from service.steps import Step
from service.storage.store import ContentStore
from service.storage.stored_folders import StoredFolder, StoreSink
from service.workers.inputs import Inputs
from service.workers.limits import is_out_of_memory, limit_memory
from service.workers.protocol import Operation, Task, TaskResult, receive, send, step_from_json
from service.workers.surroundings import enter

PRELOAD = "service.workers.preload"
PROGRESS_EVERY_S = 0.25
MAX_TRACEBACK_CHARACTERS = 20_000

Table = Callable[[], Mapping[str, Operation]]


@dataclass(frozen=True)
class WorkerSettings:
    """What one worker process is started with. `checkpoints_url` is the conversion's own store for checkpoints."""

    store_url: str
    checkpoints_url: str
    scratch: Path
    threads: int
    device: str
    memory_limit_bytes: int
    operations: Table
    preload: str


def standard_operations() -> Mapping[str, Operation]:
    """The table of `service.workers.operations`, which imports torch: called in worker processes only."""
    from service.workers.operations import OPERATIONS

    return OPERATIONS


def serve(connection: Connection, settings: WorkerSettings) -> None:
    """Entry of the process: answer `run` messages until the service closes the pipe."""
    preloaded = settings.preload in sys.modules
    enter(settings.scratch)
    limit_memory(settings.memory_limit_bytes)
    _use_threads(settings.threads)
    bench = _Bench(connection, settings)
    send(connection, "ready", {"preloaded": preloaded})
    while True:
        try:
            kind, body = receive(connection)
        except EOFError:
            return
        if kind == "run":
            _answer(bench, body)


class _Bench:
    """Where steps are run: the stores, and the inputs that were fetched already."""

    def __init__(self, connection: Connection, settings: WorkerSettings) -> None:
        self.connection = connection
        self.settings = settings
        self.store = ContentStore(settings.store_url, scratch=settings.scratch)
        self.operations = settings.operations()
        self._fetched: dict[Digest, Path] = {}

    def checkpoints(self) -> ContentStore:
        """Opened anew each time: the service deletes it as a whole when a step finishes."""
        return ContentStore(self.settings.checkpoints_url, scratch=self.settings.scratch)

    def fetch(self, digest: Digest) -> Path:
        """A verified copy of a folder, made once per process and shared by its steps."""
        if digest not in self._fetched:
            folder = self.settings.scratch / "inputs" / digest.hex
            self.store.fetch_folder(self.store.manifest(digest), folder)
            self._fetched[digest] = folder
        return self._fetched[digest]

    def open(self, digest: Digest) -> StoredFolder:
        """The same folder where it is stored."""
        return StoredFolder(self.store.manifest(digest), self.store)


class PipeMonitor:
    """A `compressors.stages.Monitor` that tells the service, and keeps checkpoints in the conversion's own store."""

    def __init__(self, bench: _Bench, folder: Path, checkpoint: Digest | None) -> None:
        self._bench = bench
        self._folder = folder
        self._checkpoint = checkpoint
        self._told = -PROGRESS_EVERY_S

    def progress(self, progress: Progress) -> None:
        """Told at most four times a second, and always at the end."""
        now = time.monotonic()
        if now - self._told < PROGRESS_EVERY_S and progress.step != progress.steps:
            return
        self._told = now
        body = {"done": progress.step, "total": progress.steps, "loss": progress.loss}
        send(self._bench.connection, "progress", body)

    def save_checkpoint(self, step: int, write: Callable[[Path], None]) -> None:
        """Returns when the checkpoint is in the store and the service has noted it as the newest."""
        folder = self._folder / f"checkpoint-{step}"
        folder.mkdir()
        write(folder)
        fault_point("worker.checkpoint.before")
        manifest = self._bench.checkpoints().put_folder(folder)
        fault_point("worker.checkpoint.after")
        shutil.rmtree(folder)
        send(self._bench.connection, "checkpoint", {"digest": str(manifest.digest)})
        receive(self._bench.connection)
        self._checkpoint = manifest.digest

    def checkpoint(self) -> Path | None:
        if self._checkpoint is None:
            return None
        folder = self._folder / "checkpoint"
        shutil.rmtree(folder, ignore_errors=True)
        store = self._bench.checkpoints()
        store.fetch_folder(store.manifest(self._checkpoint), folder)
        return folder


def _answer(bench: _Bench, body: Mapping[str, Any]) -> None:
    """Run one step; whatever goes wrong in it is an answer, too."""
    try:
        answer = _run(bench, step_from_json(body["step"]), body["checkpoint"])
    except Exception as error:  # noqa: BLE001 - the service decides what becomes of it
        send(bench.connection, "failed", _failed(error))
    else:
        send(bench.connection, "done", answer)


def _failed(error: Exception) -> dict[str, Any]:
    """An error that was raised on purpose by its parts; of every other one, and of short memory, the traceback."""
    short = is_out_of_memory(error)
    if isinstance(error, ModelpressError) and not short:
        kind = type(error).__name__
        return {"error": kind, "reason": error.reason, "message": error.message, "field": error.field}
    told = "".join(traceback.format_exception(error))
    return {"error": "OutOfMemory" if short else "", "traceback": told[-MAX_TRACEBACK_CHARACTERS:]}


def _run(bench: _Bench, step: Step, checkpoint: str | None) -> dict[str, Any]:
    folder = bench.settings.scratch / "step"
    try:
        task = _task(bench, step, folder, Digest(checkpoint) if checkpoint else None)
        start = time.monotonic()
        result = bench.operations[step.operation].run(task)
        seconds = time.monotonic() - start
        return {**_store(bench.store, task, result), "seconds": seconds}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _task(bench: _Bench, step: Step, folder: Path, checkpoint: Digest | None) -> Task:
    for name in ("output", "evidence", "work"):
        (folder / name).mkdir(parents=True)
    return Task(
        step=step,
        folder=folder / "work",
        inputs=Inputs(step.inputs, bench.fetch),
        stored=Inputs(step.inputs, bench.open),
        output=folder / "output",
        sink=StoreSink(bench.store),
        evidence=folder / "evidence",
        device=bench.settings.device,
        threads=bench.settings.threads,
        memory_limit_bytes=bench.settings.memory_limit_bytes,
        monitor=PipeMonitor(bench, folder, checkpoint),
    )


def _store(store: ContentStore, task: Task, result: TaskResult) -> dict[str, Any]:
    """Put what the operation wrote into the store: evidence first, so that a stored output is always complete."""
    record = dict(result.record)
    fault_point("worker.output.before")
    if any(task.evidence.iterdir()):
        record["evidence"] = str(store.put_folder(task.evidence).digest)
    output = _store_output(store, task)
    fault_point("worker.output.after")
    return {"digest": str(output) if output else None, "record": record}


def _store_output(store: ContentStore, task: Task) -> Digest | None:
    in_folder, in_sink = any(task.output.iterdir()), bool(task.sink.entries)
    if in_folder and in_sink:
        raise InternalError(
            f"step {task.step.name!r} wrote into its output folder and into its sink: one of them is due"
        )
    if in_sink:
        return task.sink.finish().digest
    return store.put_folder(task.output).digest if in_folder else None


def _use_threads(count: int) -> None:
    """Compute with `count` threads: part of what makes a result reproducible. Torch, where it is not imported yet,
    reads the variables when it is."""
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(count)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(count)
        torch.set_num_interop_threads(1)
