"""A base in shards, and what happens around a merge of it: reads noted, checkpoints kept, a sink that fails."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from compressors import streaming
from compressors.changes import Rows, Unchanged, wide
from compressors.output_plan import OutputPlan
from compressors.stages import Progress, StreamJob
from compressors.weight_files import WeightFiles
from modelpress.digests import Digest
from modelpress.stored_folders import FileStream
from service.storage.store import ContentStore
from service.storage.stored_folders import StoredFolder, StoreSink
from tests.compressors.stored_models import Tensors, weights_of, write_weights

SHARDS = 4
TENSORS: Tensors = {
    "a.weight": torch.randn(40, 8, generator=torch.Generator().manual_seed(1)),
    "b.bias": torch.arange(7, dtype=torch.float16),
    "c.weight": torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(2)).bfloat16(),
    "d.scale": torch.tensor(3.0),
    "e.ids": torch.arange(9),
    "f.weight": torch.ones(12, 2, dtype=torch.float64),
    "g.weight": torch.randn(6, 6, generator=torch.Generator().manual_seed(3)),
    "h.empty": torch.empty(0, 4),
}


class Doubled:
    def begin(self, stored: torch.Tensor) -> Rows:
        return lambda start, stop: 2 * wide(stored[start:stop])


CHANGES = {name: Doubled() for name in ("a.weight", "b.bias", "c.weight", "d.scale", "f.weight")}


EXPECTED = {name: tensor * 2 if name in CHANGES else tensor for name, tensor in TENSORS.items()}


class RecordingFolder(StoredFolder):
    """A source that notes what is read of it: the files that were streamed, and the size of each read."""

    def __init__(self, folder: Path, store: ContentStore) -> None:
        super().__init__(store.put_folder(folder), store)
        self.streamed: list[str] = []
        self.reads: list[int] = []

    @contextmanager
    def stream(self, path: str) -> Iterator[FileStream]:
        self.streamed.append(path)
        with super().stream(path) as stream:
            yield _Recorded(stream, self.reads)


class _Recorded:
    def __init__(self, stream: FileStream, reads: list[int]) -> None:
        self._stream = stream
        self._reads = reads
        self.finish = stream.finish

    def read_into(self, buffer: memoryview) -> None:
        self._reads.append(len(buffer))
        self._stream.read_into(buffer)


class KeepingMonitor:
    """Keeps the newest checkpoint in a folder, as a worker does."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.steps: list[tuple[int, int]] = []

    def progress(self, progress: Progress) -> None:
        self.steps.append((progress.step, progress.steps))

    def save_checkpoint(self, step: int, write: Callable[[Path], None]) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        write(self._folder)

    def checkpoint(self) -> Path | None:
        return self._folder if self._folder.exists() else None


class FailingSink(StoreSink):
    """Raises in the middle of file number `fail_at`, after its first piece."""

    def __init__(self, store: ContentStore, *, fail_at: int, error: BaseException) -> None:
        super().__init__(store)
        self._left = fail_at
        self._error = error

    @contextmanager
    def write(self, path: str) -> Iterator[Callable[[memoryview | bytes], None]]:
        self._left -= 1
        with super().write(path) as write:
            written: list[int] = []

            def failing(data: memoryview | bytes) -> None:
                if self._left == 0 and written:
                    raise self._error
                written.append(len(data))
                write(data)

            yield failing


class Table:
    """One base in shards in a store, merges of it into sinks, and the folders that come of them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = ContentStore(str(root / "store"), scratch=root / "scratch")
        (root / "base").mkdir()
        write_weights(TENSORS, root / "base", shards=SHARDS)
        self.base = RecordingFolder(root / "base", self.store)
        self.monitor = KeepingMonitor(root / "checkpoint")

    def merge(self, sink: StoreSink, changes: Mapping[str, Doubled | Unchanged] = CHANGES) -> streaming.MergeOutcome:
        files = WeightFiles.read(self.base)
        self.base.streamed.clear()
        self.base.reads.clear()
        plan = OutputPlan.of(files, changes)
        return streaming.merge_files(files, plan, StreamJob(self.base, sink, seed=0), self.monitor)

    def tensors(self, sink: StoreSink) -> Tensors:
        folder = self.root / "output"
        shutil.rmtree(folder, ignore_errors=True)
        self.store.fetch_folder(sink.finish(), folder)
        return weights_of(folder)

    def blobs(self) -> set[Path]:
        return {path for path in (self.root / "store").rglob("*") if path.is_file()}

    def blob(self, digest: Digest) -> Path:
        return next(path for path in self.blobs() if path.name == digest.hex)
