"""The real application with tiny operations: `python -m tests.service.jobs.tiny_server DATA READY PORT`.

Its forkserver preloads nothing heavy, so that it starts in a second; everything else is the service itself.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

from modelpress.reports import Environment
from service.app import serve
from service.attempt import AttemptLimits, Pipeline
from service.config import Config, load_config
from service.desk import Desk, Tools
from service.dispatcher import Dispatcher, DispatcherSettings
from service.logs import configure_logging
from service.publication import Publication
from service.workers.pool import PoolSettings, WorkerPool
from service.workers.probe import WorkerFacts
from service.workers.protocol import versions_of
from tests.service.jobs.tiny_operations import operations
from tests.service.jobs.workshop import STEPS, publish_text, step

MEMORY_LIMIT_BYTES = 2 << 30
FACTS = WorkerFacts(
    Environment(versions={}, device="cpu", cpu_capability="any", threads=1, isolation="for a test"),
    "cpu",
    {**versions_of(operations()), "compress/export": 1},
)
"""An estimate walks the real main path, whose first step is an export here."""


def path(desk: Desk) -> Publication:
    """Three steps: one that writes, one that trains with checkpoints, one that streams; the label `slow` waits."""
    first = desk.run(step("first", "write", text="a"))
    if seconds := float(desk.conversion.request.labels.get("slow", 0)):
        desk.run(step("wait", "wait", seconds=seconds))
    trained = desk.run(step("second", "train", {"model": first.digest}, steps=3))
    last = desk.run(step("third", "stream", {"model": trained.digest}, parts=3))
    return publish_text(desk, f"{first.digest} {trained.digest} {last.digest} {first.record['length']}")


def dispatch(config: Config, *, journal: Any, store: Any, signer: Any, on_failure: Any) -> Dispatcher:
    """The dispatcher of a configuration with tiny operations; parameters as `open_dispatcher`."""
    settings = PoolSettings(config.store_url, config.scratch, 1, "cpu", operations, "service.workers.process")
    tools = Tools(journal, store, signer, WorkerPool(settings), FACTS)
    limits = AttemptLimits(60.0, MEMORY_LIMIT_BYTES, config.workers.max_attempts, config.workers.lease_s / 3)
    return Dispatcher(
        journal,
        lambda: tools,
        DispatcherSettings(config.workers.slots, config.workers.lease_s, limits),
        main_path=Pipeline(path, lambda request: STEPS),
        on_failure=on_failure,
    )


async def main(data: Path, ready: Path, port: int) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    config = load_config(None, {}, {"storage": {"data": data}, "server": {"port": port, "grace_s": 5.0}})

    def announce(address: str) -> None:
        draft = ready.with_suffix(".draft")
        draft.write_text(address)
        draft.replace(ready)

    await serve(config, announce=announce, stop=stop, dispatch=dispatch)


if __name__ == "__main__":
    configure_logging("info")
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
