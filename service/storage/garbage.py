"""Deletes what nobody will come back for: expired uploads, and staging files of processes that died."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from service.state.uploads import UploadRepository
from service.storage.uploads import UPLOAD_PREFIX, UploadDesk
from service.threads import Threads

STALE_S = 3600.0
"""A staging file that nobody has written to for so long belongs to a process that died."""

COLLECT_EVERY_S = 600.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Collected:
    uploads: int
    files: int


class GarbageCollector:
    """`collect` blocks: call it off the event loop."""

    def __init__(
        self, staging: Path, repository: UploadRepository, desk: UploadDesk, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._staging = staging
        self._repository = repository
        self._desk = desk
        self._clock = clock

    def collect(self) -> Collected:
        """Delete and count. An upload that is being written, or a file of an upload that is known, is left alone."""
        now = self._clock()
        uploads = sum(self._desk.expire(upload) for upload in self._repository.expired(now))
        stale = [file for file in self._staging.iterdir() if self._is_stale(file, now)]
        for file in stale:
            file.unlink(missing_ok=True)
        collected = Collected(uploads, len(stale))
        if uploads or stale:
            _log.info("garbage collected", extra={"fields": {"uploads": uploads, "files": len(stale)}})
        return collected

    def _is_stale(self, file: Path, now: float) -> bool:
        try:
            if now - file.stat().st_mtime < STALE_S:
                return False
        except FileNotFoundError:
            return False
        name = file.name
        return not (name.startswith(UPLOAD_PREFIX) and self._repository.is_known(name.removeprefix(UPLOAD_PREFIX)))


@asynccontextmanager
async def collecting(collector: GarbageCollector, threads: Threads) -> AsyncIterator[None]:
    """Collect once before the block begins, then every ten minutes until it ends."""
    await threads.run(collector.collect)
    task = asyncio.create_task(_again_and_again(collector, threads))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _again_and_again(collector: GarbageCollector, threads: Threads) -> None:
    while True:
        await asyncio.sleep(COLLECT_EVERY_S)
        try:
            await threads.run(collector.collect)
        except Exception:  # noqa: BLE001 - whatever it was, the next round may succeed
            _log.exception("garbage collection failed; it is tried again")
