"""Threads on either side of the arithmetic: order kept, bounded, errors in the caller, none left waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from itertools import count

import pytest

from compressors.overlap import Abandoned, Pool, ahead, behind


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = threading.enumerate()
    yield
    assert threading.enumerate() == before


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("items", [0, 1, 100])
def test_items_come_in_their_order(items: int, depth: int) -> None:
    assert list(ahead(iter(range(items)), depth=depth)) == list(range(items))
    written: list[int] = []
    with behind(written.append, depth=depth) as put:
        for item in range(items):
            put(item)
    assert written == list(range(items))


def test_no_more_is_read_ahead_than_the_depth() -> None:
    produced: list[int] = []

    def produce() -> Iterator[int]:
        for item in count():
            produced.append(item)
            yield item

    with closing(ahead(produce(), depth=2)) as items:
        for item in items:
            assert len(produced) <= item + 2 + 2  # those in the queue, one in each hand
            if item == 50:
                break


def test_an_error_of_the_producer_comes_after_its_items() -> None:
    def produce() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("third")

    seen = []
    with pytest.raises(ValueError, match="third"):
        for item in ahead(produce(), depth=2):
            seen.append(item)
    assert seen == [1, 2]


def test_an_endless_producer_ends_with_its_reader() -> None:
    with pytest.raises(KeyError), closing(ahead(count(), depth=2)) as items:
        next(items)
        raise KeyError


@pytest.mark.parametrize("fails_at", [0, 1, 9])
def test_an_error_of_the_consumer_reaches_whoever_puts(fails_at: int) -> None:
    written: list[int] = []

    def consume(item: int) -> None:
        if item == fails_at:
            raise OSError("full")
        written.append(item)

    with pytest.raises(OSError, match="full"), behind(consume, depth=2) as put:
        for item in range(10):
            put(item)
    assert written == list(range(fails_at))


def test_an_error_of_the_caller_lets_the_consumer_finish_what_it_has() -> None:
    written: list[int] = []
    with pytest.raises(KeyError), behind(written.append, depth=2) as put:
        put(1)
        raise KeyError
    assert written == [1]


def test_things_of_a_pool_are_used_again() -> None:
    with Pool(["only"]) as pool:
        for _ in range(3):
            thing = pool.take()
            threading.Timer(0.01, pool.give, [thing]).start()
        assert pool.take() == "only"


def test_whoever_waits_for_a_pool_that_ends_is_woken() -> None:
    woken: list[BaseException] = []

    def wait() -> None:
        try:
            pool.take()
        except Abandoned as error:
            woken.append(error)

    with Pool[str]([]) as pool:
        thread = threading.Thread(target=wait)
        thread.start()
    thread.join(5)
    assert len(woken) == 1
