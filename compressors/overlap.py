"""Reading ahead and writing behind: a thread on either side of the arithmetic, its errors raised in the caller.

for item in ahead(produce(), depth=2):        # `produce` runs in a thread, at most two items early
    ...
with behind(write, depth=2) as put:           # `write` runs in a thread, item after item
    put(item)
with Pool(buffers) as pool:                   # what both sides share: waited for, given back, used again
    pool.give(pool.take())
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class _End:
    """Nothing follows; `error` is why, where that was not planned."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class Lane(Generic[ItemT]):
    """A queue of at most `depth` items whose either end can give up without leaving the other waiting."""

    def __init__(self, depth: int) -> None:
        self._items: queue.Queue[ItemT | _End] = queue.Queue(depth)
        self._closed = threading.Event()

    def put(self, item: ItemT | _End) -> bool:
        """False where the reader has given up."""
        while not self._closed.is_set():
            try:
                self._items.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def get(self) -> ItemT | _End:
        return self._items.get()

    def close(self) -> None:
        """No more items are wanted."""
        self._closed.set()


class Pool(Generic[ItemT]):
    """Things to take and give back. Leaving the block wakes whoever waits: `take` then raises Abandoned."""

    def __init__(self, items: Iterable[ItemT]) -> None:
        self._items: queue.SimpleQueue[ItemT] = queue.SimpleQueue()
        self._closed = threading.Event()
        for item in items:
            self.give(item)

    def take(self) -> ItemT:
        while not self._closed.is_set():
            try:
                return self._items.get(timeout=0.1)
            except queue.Empty:
                continue
        raise Abandoned

    def give(self, item: ItemT) -> None:
        self._items.put(item)

    def __enter__(self) -> Pool[ItemT]:
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()


class Abandoned(Exception):
    """What the pool was for has ended."""


def ahead(items: Iterator[ItemT], *, depth: int) -> Generator[ItemT, None, None]:
    """The same items in the same order, produced in a thread while the caller works on the ones before."""
    lane: Lane[ItemT] = Lane(depth)

    def produce() -> None:
        try:
            all(lane.put(item) for item in items)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller
            lane.put(_End(error))
        else:
            lane.put(_End())

    thread = threading.Thread(target=produce, name="reading ahead", daemon=True)
    thread.start()
    try:
        while not isinstance(item := lane.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        lane.close()
        thread.join()


@contextmanager
def behind(consume: Callable[[ItemT], None], *, depth: int) -> Iterator[Callable[[ItemT], None]]:
    """`consume` is called in a thread for every item that is put; leaving the block waits for the last of them.

    An error of `consume` is raised by the next put, or on leaving; an error in the block ends the thread without it.
    """
    lane: Lane[ItemT] = Lane(depth)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            while not isinstance(item := lane.get(), _End):
                consume(item)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller
            failed.append(error)
            lane.close()

    def put(item: ItemT) -> None:
        if not lane.put(item):
            raise failed[0]

    thread = threading.Thread(target=work, name="writing behind", daemon=True)
    thread.start()
    try:
        yield put
    finally:
        lane.put(_End())
        thread.join()
    if failed:
        raise failed[0]
