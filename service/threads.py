"""A bounded pool for everything that blocks: disk, hashing, database. The event loop does none of it."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_END = object()


class Threads:
    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="modelpress")

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Start `function` in a thread, with this task's context variables; the future is its result."""
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._pool, lambda: context.run(function, *args, **kwargs))

    async def iterate(self, items: Iterator[T]) -> AsyncIterator[T]:
        """The items, each made in a thread while the one before is being used."""
        ahead = self.run(next, items, _END)
        while (item := await ahead) is not _END:
            ahead = self.run(next, items, _END)
            yield item  # type: ignore[misc]

    def close(self) -> None:
        """Wait for what runs; what has not begun never does."""
        self._pool.shutdown(wait=True, cancel_futures=True)
