"""In memory are one decoder layer and one batch of windows, on disk two files of activations: counted, not timed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from modelpress.stored_folders import FileStream
from service.storage.store import ContentStore
from service.storage.stored_folders import StoredFolder
from tests.compressors.decoders import make_decoder
from tests.compressors.quantizing import Bench

HIDDEN, FFN = 64, 128
LAYER_BYTES = 4 * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 2 + 3 * HIDDEN * FFN)
"""Of a decoder layer's matrices in float32, with half as many key and value heads as heads."""


class WatchedFolder(StoredFolder):
    """A source that counts, whenever it is read, the bytes of all live tensors and the files in `scratch`."""

    def __init__(self, folder: StoredFolder, store: ContentStore, scratch: Path) -> None:
        super().__init__(store.put_folder(folder), store)
        self._scratch = scratch
        self.tensor_bytes: list[int] = []
        self.scratch_bytes: list[int] = []

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        self._look()
        super().read_into(path, offset, buffer)

    @contextmanager
    def stream(self, path: str) -> Iterator[FileStream]:
        self._look()
        with super().stream(path) as stream:
            yield stream

    def _look(self) -> None:
        self.tensor_bytes.append(live_bytes())
        self.scratch_bytes.append(sum(file.stat().st_size for file in self._scratch.glob("*")))


def live_bytes() -> int:
    """Of every storage that a tensor holds which was made since `gc.freeze`."""
    gc.collect()
    tensors = (found for found in gc.get_objects() if issubclass(type(found), torch.Tensor))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.device.type == "cpu"}
    return sum(storages.values())


def watched(root: Path, *, layers: int, windows: int) -> tuple[int, int]:
    """The most bytes in tensors and in scratch files."""
    model = make_decoder(root / "model", num_hidden_layers=layers)
    bench = Bench(root, model)
    bench.base = folder = WatchedFolder(model, bench.store, root / "scratch")
    gc.collect()
    gc.freeze()
    try:
        bench.run(calibration_samples=windows)
    finally:
        gc.unfreeze()
    return max(folder.tensor_bytes), max(folder.scratch_bytes)


@pytest.mark.parametrize("windows", [8, 48])
def test_memory_does_not_grow_with_the_number_of_layers(tmp_path: Path, windows: int):
    shallow, _ = watched(tmp_path / "shallow", layers=2, windows=windows)
    deep, _ = watched(tmp_path / "deep", layers=8, windows=windows)
    assert deep - shallow < LAYER_BYTES / 4
    assert LAYER_BYTES < deep < 4 * LAYER_BYTES


def test_memory_does_not_grow_with_the_calibration_windows(tmp_path: Path):
    few, _ = watched(tmp_path / "few", layers=3, windows=8)
    many, _ = watched(tmp_path / "many", layers=3, windows=48)
    assert many - few < 48 * 32 * HIDDEN * 4 / 2


@pytest.mark.parametrize("layers", [2, 6])
def test_disk_holds_the_activations_of_two_layers_at_most(tmp_path: Path, layers: int):
    _, scratch = watched(tmp_path, layers=layers, windows=8)
    assert 8 * 32 * HIDDEN * 4 <= scratch <= 2 * 8 * 32 * HIDDEN * 4
