"""One round of transfers: the floor, an upload and a download of the same bytes, one after the other."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from benchmarks.tiny import WEIGHTS
from modelpress import Client
from modelpress.manifests import ArtifactKind
from modelpress.pieces import pieces
from modelpress.views import TransferProgress


@dataclass(frozen=True)
class Round:
    """Seconds. `send_s` is the part of `upload_s` between hashing the files and naming them as an artifact."""

    size_bytes: int
    floor_s: float
    send_s: float
    upload_s: float
    download_s: float


class Marks:
    """When the client showed progress: first with the first chunk on its way, last with everything stored."""

    def __init__(self) -> None:
        self.first = self.last = 0.0

    def __call__(self, _: TransferProgress) -> None:
        self.last = perf_counter()
        self.first = self.first or self.last


def measure_round(client: Client, model: Path, scratch: Path) -> Round:
    floor_s = keep((model / WEIGHTS).read_bytes(), scratch / "floor")
    marks, names = Marks(), []
    upload_s = timed(lambda: names.append(client.upload_folder(model, ArtifactKind.MODEL, show=marks)))
    download_s = timed(lambda: client.download(names[0], scratch / "output"))
    shutil.rmtree(scratch / "output")
    size = sum(file.stat().st_size for file in model.iterdir())
    return Round(size, floor_s, marks.last - marks.first, upload_s, download_s)


def keep(data: bytes, file: Path) -> float:
    """Seconds to hash, write and sync bytes that are in memory."""

    def work() -> None:
        sha256 = hashlib.sha256()
        with file.open("wb", buffering=0) as sink:
            for piece in pieces(data):
                sha256.update(piece)
                sink.write(piece)
            os.fsync(sink.fileno())

    seconds = timed(work)
    file.unlink()
    return seconds


def timed(work: Callable[[], object]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start
