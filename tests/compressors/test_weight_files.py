"""Stored tensors are located and read one at a time, as safetensors reads them; a bad file is named with its cure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compressors.weight_files import DTYPE_NAMES, DTYPES, WeightFiles, json_bytes, read_json
from modelpress.errors import DataLoss, InvalidModel
from tests.compressors.lora_merges import Bench
from tests.compressors.stored_models import Tensors, same, write_weights

EVERY_DTYPE: Tensors = {
    f"t.{name}": torch.arange(48, dtype=torch.uint8).view(dtype).reshape(2, -1)
    if name != "BOOL"
    else torch.tensor([[True, False]])
    for name, dtype in DTYPES.items()
}
OTHERS: Tensors = {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "cube": torch.randn(2, 3, 4)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_are_those_that_safetensors_reads(shards: int, folder: Path, bench: Bench) -> None:
    write_weights(EVERY_DTYPE | OTHERS, folder, shards=shards)

    files = WeightFiles.read(bench.source(folder))

    assert same({name: files.load(name) for name in files.tensors}, EVERY_DTYPE | OTHERS)
    assert len(files.files) == shards
    for file in files.files:
        data = (folder / file.path).read_bytes()
        assert [tensor.path for tensor in file.tensors] == [file.path] * len(file.tensors)
        assert file.tensors[0].offset == file.data_start
        assert sum(tensor.size_bytes for tensor in file.tensors) == len(data) - file.data_start
        for tensor in file.tensors:
            stored = load_file(folder / file.path)[tensor.name]
            assert (tensor.dtype, tensor.shape, tensor.elements) == (stored.dtype, tuple(stored.shape), stored.numel())


def test_names_of_dtypes_are_told_apart() -> None:
    assert {DTYPES[DTYPE_NAMES[dtype]] for dtype in DTYPES.values()} == set(DTYPES.values())
    assert len(DTYPE_NAMES) == len(DTYPES)


def test_an_adapter_has_files_of_another_name(folder: Path, bench: Bench) -> None:
    save_file(OTHERS, folder / "adapter_model.safetensors")

    assert WeightFiles.read(bench.source(folder), "adapter_model").tensors.keys() == OTHERS.keys()
    with pytest.raises(InvalidModel, match=r"model\.safetensors is missing: .*save_pretrained"):
        WeightFiles.read(bench.source(folder))


@pytest.mark.parametrize(
    ("index", "mentions"),
    [
        ({}, ["weight_map", "save_pretrained"]),
        ({"weight_map": ["a"]}, ["weight_map"]),
        ({"weight_map": {"a": 1}}, ["weight_map"]),
        ({"weight_map": {"a": "gone.safetensors"}}, ["gone.safetensors", "missing"]),
        ([], ["index.json"]),
    ],
)
def test_a_bad_index_is_refused(index: object, mentions: list[str], folder: Path, bench: Bench) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(InvalidModel) as error:
        WeightFiles.read(bench.source(folder))

    assert all(mention in error.value.message for mention in mentions), error.value.message


def test_a_tensor_in_two_files_is_refused(folder: Path, bench: Bench) -> None:
    write_weights(OTHERS, folder, shards=2)
    save_file(OTHERS, folder / "model-00001-of-00002.safetensors")

    with pytest.raises(InvalidModel, match=r"'(cube|empty|scalar)' stands in two files"):
        assert WeightFiles.read(bench.source(folder)).tensors


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "EMPTY_FILE"),
        (b"PK\x03\x04" + b"\0" * 64, "PICKLE_FILE"),
        (b"version https://git-lfs.github.com/spec/v1\n", "NOT_SAFETENSORS"),
        ((1 << 40).to_bytes(8, "little") + b'{"a":1}', "TRUNCATED_FILE"),
    ],
)
def test_what_is_no_safetensors_file_is_named(data: bytes, reason: str, folder: Path, bench: Bench) -> None:
    (folder / "model.safetensors").write_bytes(data)

    with pytest.raises(InvalidModel, match=r"model\.safetensors") as error:
        WeightFiles.read(bench.source(folder))

    assert error.value.reason == reason


def test_a_dtype_that_is_not_read_is_named(folder: Path, bench: Bench) -> None:
    header = b'{"t":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0")

    with pytest.raises(InvalidModel, match=r"'t'.*F4"):
        WeightFiles.read(bench.source(folder))


def test_json_is_verified_while_it_is_read(folder: Path, bench: Bench) -> None:
    (folder / "config.json").write_text('{"a": 1}')
    source = bench.source(folder)
    assert read_json(source, "config.json") == {"a": 1}

    blob = next(file for file in (bench.root / "store").rglob(source.files["config.json"].digest.hex))
    blob.chmod(0o600)
    blob.write_text('{"a": 2}')

    with pytest.raises(DataLoss):
        read_json(source, "config.json")


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1, "a": 2}', "NaN"])
def test_what_is_no_json_object_is_refused(text: str, folder: Path, bench: Bench) -> None:
    (folder / "config.json").write_text(text)

    with pytest.raises(InvalidModel, match=r"config\.json"):
        read_json(bench.source(folder), "config.json")


def test_json_is_written_as_transformers_writes_it() -> None:
    value = {"b": ["ä", 1.5], "a": None}

    assert json.loads(json_bytes(value)) == value
    assert json_bytes(value).startswith(b'{\n  "b": [')
    assert json_bytes(value).endswith(b"\n}\n")
    assert "ä".encode() in json_bytes(value)
