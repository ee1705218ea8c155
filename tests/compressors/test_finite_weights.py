"""A model is read once: bytes that changed and values that are not finite are both found, wherever they stand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compressors import finite_weights
from compressors.finite_weights import verify_finite
from compressors.weight_files import WeightFiles
from modelpress.errors import DataLoss, InvalidModel
from service.storage.store import ContentStore
from tests.compressors.stored_models import Tensors, write_weights
from tests.compressors.streams import RecordingFolder


def stored(root: Path, tensors: Tensors) -> RecordingFolder:
    (root / "model").mkdir()
    write_weights(tensors, root / "model", shards=2)
    return RecordingFolder(root / "model", ContentStore(str(root / "store"), scratch=root / "scratch"))


def test_every_file_is_streamed_once(tmp_path: Path):
    folder = stored(tmp_path, {"a": torch.ones(5), "b": torch.ones(3).bfloat16(), "c": torch.arange(4)})
    files = WeightFiles.read(folder)
    folder.streamed.clear()
    verify_finite(files)
    assert folder.streamed == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("place", [0, -1])
def test_a_tensor_with_infinity_is_named(tmp_path: Path, dtype: torch.dtype, place: int):
    bad = torch.ones(finite_weights.PIECE_BYTES // 2 + 3, dtype=dtype)
    bad[place] = float("-inf")
    folder = stored(tmp_path, {"a": torch.ones(5), "b": bad, "c": torch.arange(4)})
    with pytest.raises(InvalidModel, match="tensor 'b' of the model holds NaN or infinite values"):
        verify_finite(WeightFiles.read(folder))


def test_bytes_that_changed_are_told_before_what_they_hold(tmp_path: Path):
    folder = stored(tmp_path, {"a": torch.ones(64), "b": torch.ones(5)})
    files = WeightFiles.read(folder)
    digest = folder.files["model-00001-of-00002.safetensors"].digest
    blob = next(path for path in (tmp_path / "store").rglob("*") if path.name == digest.hex)
    data = blob.read_bytes()
    blob.chmod(0o600)
    blob.write_bytes(data[:-4] + torch.tensor([float("nan")]).numpy().tobytes())
    with pytest.raises(DataLoss):
        verify_finite(files)
