"""The worker of one attempt: started when it is first needed, stopped from any thread, and then never again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum

from modelpress.errors import Cancelled
from service.workers.pool import Worker


class Stop(Enum):
    """Why an attempt is ended from outside."""

    CANCELLED = "cancel was asked for"
    DRAINED = "the server is stopping"
    TIMED_OUT = "it ran too long"
    OUT_OF_MEMORY = "it used too much memory"
    LOST = "another server has taken over"


class Stopped(Cancelled):
    """Raised in the attempt's own thread when it was stopped from another."""

    reason = "STOPPED"


class Station:
    def __init__(self, open_worker: Callable[[], Worker]) -> None:
        self._open = open_worker
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self.stopped: Stop | None = None
        self.most_memory_bytes = 0
        """The most that was ever seen in use."""

    def worker(self) -> Worker:
        """The running worker, started now where there is none. Raises Stopped, WorkerDied."""
        with self._lock:
            self.check()
            if self._worker is not None:
                return self._worker
            self._worker = worker = self._open()
        worker.receive()  # `ready`; waited for without the lock, so that `stop` need not wait for it
        return worker

    def check(self) -> None:
        """Raise Stopped where the attempt was stopped."""
        if self.stopped is not None:
            raise Stopped(f"the attempt was stopped: {self.stopped.value}")

    def memory_bytes(self) -> int:
        """What the worker and its children use now."""
        used = self._worker.memory_bytes() if self._worker else 0
        self.most_memory_bytes = max(self.most_memory_bytes, used)
        return used

    def stop(self, cause: Stop) -> None:
        """End the worker within two seconds and let no other one start."""
        self.stopped = self.stopped or cause
        with self._lock:
            if self._worker is not None:
                self._worker.stop()

    def close(self) -> None:
        """Delete what the worker leaves on this machine."""
        with self._lock:
            if self._worker is not None:
                self._worker.close()
