"""Worker processes as the service sees them: start one, give it steps, end it.

They come from multiprocessing's forkserver, which is a process of its own that was started by exec: nothing is ever
forked from the service, whose gRPC threads would not survive it.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from modelpress.digests import Digest
from modelpress.errors import InternalError
from service.steps import Step
from service.storage.checkpoints import checkpoints_url
from service.workers.limits import memory_bytes
from service.workers.process import PRELOAD, Table, WorkerSettings, serve, standard_operations
from service.workers.protocol import receive, send, step_to_json

STOP_S = 1.0
"""Between SIGTERM and SIGKILL."""


class WorkerDied(InternalError):
    """The process ended without an answer. `cause` says how, e.g. `killed by signal 9 (SIGKILL)`."""

    reason = "WORKER_DIED"

    def __init__(self, cause: str) -> None:
        self.cause = cause
        super().__init__(f"the worker process {cause}")


@dataclass(frozen=True)
class Answer:
    """The last word on a step: `done`, or `failed` with what went wrong."""

    kind: str
    body: Mapping[str, Any]


@dataclass(frozen=True)
class Listener:
    """What the service does with what a running step tells."""

    progress: Callable[[Mapping[str, Any]], None]
    checkpoint: Callable[[Digest], None]
    """Returns when the checkpoint is noted: the worker waits for it."""


class Worker:
    """One process. `run` is for one thread; `stop` and `memory_bytes` may be called from any other."""

    def __init__(self, process: ForkServerProcess, connection: Connection, scratch: Path) -> None:
        self._process = process
        self._connection = connection
        self._scratch = scratch
        self._handle = os.pidfd_open(_pid(process))
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        return _pid(self._process)

    def run(self, step: Step, checkpoint: Digest | None, listener: Listener) -> Answer:
        """Give it a step and wait for its answer. Raises WorkerDied."""
        self._send("run", {"step": step_to_json(step), "checkpoint": str(checkpoint) if checkpoint else None})
        while True:
            kind, body = self.receive()
            if kind in ("done", "failed"):
                return Answer(kind, body)
            if kind == "progress":
                listener.progress(body)
            elif kind == "checkpoint":
                listener.checkpoint(Digest(body["digest"]))
                self._send("saved", {})

    def receive(self) -> tuple[str, dict[str, Any]]:
        """The next message. Raises WorkerDied."""
        try:
            return receive(self._connection)
        except (EOFError, OSError):
            raise self._died() from None

    def memory_bytes(self) -> int:
        return memory_bytes(self.pid)

    def stop(self) -> None:
        """End the process and all that it started: SIGTERM, a second later SIGKILL. Its checkpoints stay."""
        with self._lock:
            if self._handle < 0:
                return
            self._signal(signal.SIGTERM)
            self._process.join(STOP_S)
            self._signal(signal.SIGKILL)
            self._process.join(STOP_S)

    def close(self) -> None:
        """Stop it and delete its scratch folder, whatever state it is in."""
        self.stop()
        with self._lock:
            if self._handle >= 0:
                os.close(self._handle)
                self._handle = -1
        self._connection.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _send(self, kind: str, body: Mapping[str, Any]) -> None:
        try:
            send(self._connection, kind, body)
        except OSError:
            raise self._died() from None

    def _died(self) -> WorkerDied:
        with self._lock:  # multiprocessing reads an exit code once: of two threads that join, one would get a wrong one
            self._process.join(STOP_S)
            return WorkerDied(_cause(self._process.exitcode))

    def _signal(self, number: signal.Signals) -> None:
        """To the process by its handle, which no other process can have, and to its group, which holds its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)


@dataclass(frozen=True)
class PoolSettings:
    """What all workers of a server share. `device` is `auto`, `cpu` or `cuda`; a probe finds out what it means."""

    store_url: str
    scratch: Path
    threads: int
    device: str
    operations: Table = standard_operations
    preload: str = PRELOAD
    """The module that the forkserver imports once; every worker begins with it imported."""


class WorkerPool:
    """Starts workers. A process has one forkserver: its first pool decides what is preloaded."""

    def __init__(self, settings: PoolSettings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([settings.preload])

    def open(self, conversion: str, *, attempt: int, device: str, memory_limit_bytes: int) -> Worker:
        """Start a worker with a scratch folder of its own; its first message is `ready`."""
        scratch = self.scratch / f"{conversion}-{attempt}"
        settings = WorkerSettings(
            store_url=self.settings.store_url,
            checkpoints_url=checkpoints_url(self.settings.store_url, conversion),
            scratch=scratch,
            threads=self.settings.threads,
            device=device,
            memory_limit_bytes=memory_limit_bytes,
            operations=self.settings.operations,
            preload=self.settings.preload,
        )
        return self.start(serve, settings, scratch)

    def start(self, target: Callable[..., None], settings: object, scratch: Path) -> Worker:
        """Start `target(connection, settings)` in a forked child; `scratch` is made, and deleted when it is closed."""
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True, mode=0o700)
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(theirs, settings), daemon=True)
        try:
            with self._lock:  # multiprocessing keeps a list of children without a lock of its own
                process.start()
        except (EOFError, ConnectionError) as error:
            ours.close()
            raise WorkerDied("was not started: the process that forks workers had ended") from error
        finally:
            theirs.close()
        return Worker(process, ours, scratch)

    @property
    def scratch(self) -> Path:
        return self.settings.scratch / "workers"

    def clear(self) -> None:
        """Delete what the workers of a server that was killed left in the scratch folder."""
        shutil.rmtree(self.scratch, ignore_errors=True)


def _pid(process: ForkServerProcess) -> int:
    if process.pid is None:
        raise InternalError("a worker process has no id: it was not started")
    return process.pid


def _cause(exit_code: int | None) -> str:
    if exit_code is None:
        return "closed its pipe and went on running"
    if exit_code < 0:
        return f"was killed by signal {-exit_code} ({signal.Signals(-exit_code).name})"
    return f"exited with code {exit_code} without an answer"
