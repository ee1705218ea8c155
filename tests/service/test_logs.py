"""Logs: one JSON object per line that names its conversion, also from threads."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from service.logs import configure_logging, conversion_context
from service.threads import Threads

log = logging.getLogger("service.test")


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root, level, ours = logging.getLogger(), logging.getLogger().level, logging.getLogger("service").level
    handlers = list(root.handlers)
    sink = io.StringIO()
    configure_logging("info", sink)
    yield sink
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("service").setLevel(ours)


def test_a_line_is_one_json_object_with_its_facts(stream: io.StringIO) -> None:
    log.info("two\nlines", extra={"fields": {"seconds": 1.5}})
    log.debug("not wanted")
    logging.getLogger("library").info("not wanted either")
    (line,) = stream.getvalue().splitlines()
    found = json.loads(line)
    assert (found["level"], found["logger"], found["message"], found["seconds"]) == (
        "info",
        "service.test",
        "two\nlines",
        1.5,
    )
    assert found["time"].endswith("Z") and "conversion" not in found


def test_an_exception_is_part_of_its_line(stream: io.StringIO) -> None:
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        log.exception("it failed")
    (line,) = stream.getvalue().splitlines()
    assert "RuntimeError: broken" in json.loads(line)["exception"]


def test_lines_name_the_conversion_that_they_belong_to_in_threads_too(stream: io.StringIO) -> None:
    async def work(threads: Threads, name: str) -> None:
        with conversion_context(name):
            await threads.run(log.info, "working")
            log.info("waiting")

    async def both() -> None:
        threads = Threads(2)
        await asyncio.gather(work(threads, "a"), work(threads, "b"))
        threads.close()
        log.info("done")

    asyncio.run(both())
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert sorted((line.get("conversion", ""), line["message"]) for line in lines) == [
        ("", "done"),
        ("a", "waiting"),
        ("a", "working"),
        ("b", "waiting"),
        ("b", "working"),
    ]
