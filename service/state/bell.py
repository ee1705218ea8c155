"""A bell per conversion: watchers in this process sleep until it rings. A ring is a hint, the database the truth."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Bell:
    """Rung from any thread, heard on any event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[str, set[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = defaultdict(set)

    @contextmanager
    def listen(self, conversion: str) -> Iterator[asyncio.Event]:
        """An event of the running loop that is set at every ring; the listener clears it before it looks."""
        listener = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._listeners[conversion].add(listener)
        try:
            yield listener[1]
        finally:
            with self._lock:
                self._listeners[conversion].discard(listener)
                if not self._listeners[conversion]:
                    del self._listeners[conversion]

    def ring(self, conversion: str) -> None:
        with self._lock:
            for loop, event in self._listeners.get(conversion, ()):
                with suppress(RuntimeError):  # the loop was closed a moment ago: nobody is left to hear it
                    loop.call_soon_threadsafe(event.set)
