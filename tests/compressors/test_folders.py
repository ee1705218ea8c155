"""Model folders: what is loaded is what is stored, what is written is complete, what is wrong is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compressors.folders import companion_files, load_model, load_tokenizer, read_config, save_model
from modelpress.errors import InvalidModel
from modelpress.manifests import scan_folder


@pytest.fixture
def model(bert: Path, tmp_path: Path) -> Path:
    """A copy that the test may spoil."""
    return Path(shutil.copytree(bert, tmp_path / "model"))


def change_config(folder: Path, **fields: object) -> None:
    (folder / "config.json").write_text(json.dumps(read_config(folder) | fields))


def change_tensors(folder: Path, **tensors: torch.Tensor) -> None:
    save_file(
        load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors", metadata={"format": "pt"}
    )


def test_saving_an_unchanged_model_writes_the_same_folder(bert: Path, tmp_path: Path) -> None:
    save_model(load_model(bert), source=bert, output=tmp_path / "copy")

    assert scan_folder(tmp_path / "copy") == scan_folder(bert)


def test_the_config_changes_only_where_the_model_does(bert: Path, tmp_path: Path) -> None:
    loaded = load_model(bert)
    loaded.config.intermediate_size = 24
    save_model(loaded, source=bert, output=tmp_path / "copy")

    before, after = read_config(bert), read_config(tmp_path / "copy")
    assert {name for name in before | after if before.get(name) != after.get(name)} == {"intermediate_size"}


def test_tensors_keep_their_stored_dtype(bert: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(bert, tmp_path / "half"))
    halved = {name: tensor.bfloat16() for name, tensor in load_file(bert / "model.safetensors").items()}
    save_file(halved, source / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model(source)
    save_model(loaded, source=source, output=tmp_path / "copy")

    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    saved = load_file(tmp_path / "copy/model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in halved.items())


def test_shards_are_read_as_one_model(bert: Path, tmp_path: Path) -> None:
    load_model(bert).save_pretrained(tmp_path / "sharded", max_shard_size="10KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1

    state, expected = load_model(tmp_path / "sharded").state_dict(), load_model(bert).state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert companion_files(tmp_path / "sharded") == ()


def test_weights_in_other_formats_are_no_companions(model: Path) -> None:
    (model / "pytorch_model.bin").write_bytes(b"stale")
    (model / "model.onnx.data").write_bytes(b"stale")
    (model / "onnx").mkdir()
    (model / "onnx/model.onnx").write_bytes(b"stale")

    assert {"pytorch_model.bin", "onnx/model.onnx", "model.onnx.data"}.isdisjoint(companion_files(model))


@pytest.mark.parametrize(
    ("fields", "mentions"),
    [
        (
            {"architectures": ["BertForTokenClassification"]},
            ["BertForTokenClassification", "BertForSequenceClassification"],
        ),
        ({"architectures": ["os.system"]}, ["os.system", "BertForSequenceClassification"]),
        ({"architectures": None}, ["architectures"]),
        ({"model_type": "gpt2"}, ["gpt2", "bert"]),
        ({"model_type": ["bert"]}, ["model_type"]),
        ({"quantization_config": {"bits": 4}}, ["quantized already"]),
    ],
)
def test_an_unknown_config_is_refused_by_name(model: Path, fields: dict[str, object], mentions: list[str]) -> None:
    change_config(model, **fields)

    with pytest.raises(InvalidModel) as error:
        load_model(model)
    assert all(word in error.value.message for word in mentions)


def test_nan_is_refused_naming_the_tensor(model: Path) -> None:
    change_tensors(model, **{"classifier.bias": torch.tensor([0.0, float("nan")])})

    with pytest.raises(InvalidModel, match=r"classifier\.bias"):
        load_model(model)


def test_missing_surplus_and_misshapen_tensors_are_refused(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    for changed, mention in (
        ({k: v for k, v in tensors.items() if k != "classifier.weight"}, "classifier.weight"),
        (tensors | {"extra.weight": torch.zeros(2)}, "extra.weight"),
        (tensors | {"classifier.weight": torch.zeros(3, 16)}, "classifier.weight"),
    ):
        save_file(changed, model / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(InvalidModel, match=mention):
            load_model(model)


@pytest.mark.parametrize(
    "fields", [{"layer_norm_eps": 0}, {"pad_token_id": 1000}, {"dtype": "rubbish"}, {"hidden_dropout_prob": "x"}]
)
def test_a_config_that_no_model_can_be_made_of_is_the_model_s_fault(model: Path, fields: dict[str, object]) -> None:
    change_config(model, **fields)

    with pytest.raises(InvalidModel, match="do not load into BertForSequenceClassification"):
        load_model(model)


def test_pickle_weights_are_refused_with_the_cure(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"\x80\x04.")

    with pytest.raises(InvalidModel, match=r"pytorch_model\.bin.*save_pretrained"):
        load_model(model)


@pytest.mark.parametrize("content", [b"", b"<html>", b"version https://git-lfs.github.com/spec/v1\n", b"\xff" * 64])
def test_a_file_that_is_no_safetensors_is_refused(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)

    with pytest.raises(InvalidModel) as error:
        load_model(model)
    assert str(model) not in error.value.message


def test_an_index_stays_inside_the_folder(model: Path) -> None:
    (model / "model.safetensors").rename(model.parent / "outside.safetensors")
    index = {"weight_map": {"classifier.weight": "../outside.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(InvalidModel, match="outside"):
        load_model(model)


@pytest.mark.parametrize(("content", "mention"), [(None, "no config.json"), ("{", "JSON"), ("[]", "list")])
def test_a_bad_config_file_is_refused(model: Path, content: str | None, mention: str) -> None:
    (model / "config.json").unlink()
    if content is not None:
        (model / "config.json").write_text(content)

    with pytest.raises(InvalidModel, match=mention):
        load_model(model)


def test_a_model_without_tokenizer_is_refused(model: Path) -> None:
    (model / "tokenizer.json").unlink()

    with pytest.raises(InvalidModel, match="no tokenizer"):
        load_tokenizer(model)
