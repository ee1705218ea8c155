"""What a merge will write: headers that safetensors reads, files that are kept, an index that is right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from compressors.changes import Unchanged
from compressors.output_plan import ALIGNMENT, OutputFile, OutputPlan, OutputTensor, header_bytes
from compressors.weight_files import WeightFiles
from tests.compressors.lora_merges import Bench
from tests.compressors.stored_models import BASE, write_weights

INDEX = "model.safetensors.index.json"
CHANGED = "layers.0.weight"


def read(bench: Bench, folder: Path, *, shards: int = 1) -> WeightFiles:
    folder.mkdir()
    write_weights(BASE, folder, shards=shards)
    return WeightFiles.read(bench.source(folder))


@pytest.mark.parametrize("names", [["a"], ["a", "bb", "c.weight"], ["ä\"'\\"]])
def test_a_header_is_one_that_safetensors_reads(names: list[str]) -> None:
    shapes = [(2, 3), (), (0, 4)]
    dtypes = [torch.bfloat16, torch.float64, torch.int8]
    tensors = tuple(
        OutputTensor(name, dtype, shape, None) for name, dtype, shape in zip(names, dtypes, shapes, strict=False)
    )
    header = header_bytes(tensors)

    loaded = load(header + bytes(sum(tensor.size_bytes for tensor in tensors)))

    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in loaded.items()} == {
        tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors
    }
    assert len(header) % ALIGNMENT == 0
    assert json.loads(header[8:])["__metadata__"] == {"format": "pt"}


def test_a_header_is_the_one_of_save_pretrained(bench: Bench, tmp_path: Path) -> None:
    files = read(bench, tmp_path / "model")
    plan = OutputPlan.of(files, {})

    data = (tmp_path / "model/model.safetensors").read_bytes()

    assert header_bytes(plan.files[0].tensors) == data[: files.files[0].data_start]


def test_a_file_is_kept_where_nothing_of_it_changes(bench: Bench, tmp_path: Path) -> None:
    files = read(bench, tmp_path / "model", shards=3)
    holder = files.tensors[CHANGED].path

    plan = OutputPlan.of(files, {CHANGED: Unchanged()})

    assert {file.path for file in plan.files if not file.is_kept} == {holder}
    assert all(file.keeps_header for file in plan.files)
    assert plan.index(files) is None


def test_another_dtype_is_that_of_the_changed_tensors(bench: Bench, tmp_path: Path) -> None:
    files = read(bench, tmp_path / "model", shards=3)

    plan = OutputPlan.of(files, {CHANGED: Unchanged()}, dtype=torch.bfloat16)

    assert {t.name: t.dtype for t in plan.tensors} == {
        name: torch.bfloat16 if name == CHANGED else tensor.dtype for name, tensor in BASE.items()
    }
    index = json.loads(plan.index(files) or b"")
    before = json.loads((tmp_path / "model" / INDEX).read_text())
    saved = BASE[CHANGED].nbytes // 2
    assert index["metadata"] == {"total_size": before["metadata"]["total_size"] - saved}
    assert index["weight_map"] == before["weight_map"]


def test_a_new_tensor_stands_in_the_index(bench: Bench, tmp_path: Path) -> None:
    files = read(bench, tmp_path / "model", shards=2)
    plan = OutputPlan.of(files, {})
    last = plan.files[-1]
    new = OutputTensor("new.weight", torch.float16, (4, 2), None, Unchanged())

    plan = OutputPlan((*plan.files[:-1], OutputFile(last.origin, (*last.tensors, new))))

    index = json.loads(plan.index(files) or b"")
    assert index["weight_map"]["new.weight"] == last.path
    assert list(index["weight_map"]) == sorted(index["weight_map"])
    assert [file.is_kept for file in plan.files] == [True, False]


def test_fields_of_the_index_that_the_merge_does_not_know_stay(bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_weights(BASE, folder, shards=2)
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({**index, "metadata": {"total_parameters": 1, "by": "x"}, "other": [1]}))
    files = WeightFiles.read(bench.source(folder))

    written = json.loads(OutputPlan.of(files, {CHANGED: Unchanged()}, dtype=torch.float16).index(files) or b"")

    elements = sum(tensor.numel() for tensor in BASE.values())
    assert (written["other"], written["metadata"]) == ([1], {"total_parameters": elements, "by": "x"})


def test_one_file_has_no_index(bench: Bench, tmp_path: Path) -> None:
    files = read(bench, tmp_path / "model")

    assert OutputPlan.of(files, {CHANGED: Unchanged()}, dtype=torch.float16).index(files) is None
