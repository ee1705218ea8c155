"""A model that is taken in is sound, finite, and carries nothing that could run; of a known family it is complete."""

from __future__ import annotations

import io
import json
import pickle
import tempfile
import zipfile
from typing import Any

import numpy as np
import pytest

from modelpress.errors import InvalidModel, InvalidRequest
from modelpress.manifests import ArtifactKind
from service.intake.weights import FINITE_MASKS, count_non_finite
from tests.service.intake.tiny import CONFIG, TOKENIZER, Files, Inspect, encode, safetensors, tensors_of

MODEL = ArtifactKind.MODEL


def refuse(inspect: Inspect, files: Files) -> InvalidModel:
    with pytest.raises(InvalidModel) as caught:
        inspect(MODEL, files)
    assert tempfile.gettempdir() not in caught.value.message
    return caught.value


def test_facts_are_counted_from_the_headers(inspect: Inspect, base_files: Files) -> None:
    facts = inspect(MODEL, base_files)
    layer = 4 * (8 * 8 + 8) + 2 * 8 + (16 * 8 + 16) + (8 * 16 + 8) + 2 * 8
    assert facts["parameters"] == (12 + 16 + 2) * 8 + 2 * 8 + 2 * layer + (8 * 8 + 8) + (2 * 8 + 2)
    assert facts["weight_bytes"] == 4 * facts["parameters"]
    assert facts["labels"] == ["benign", "injection"]
    assert facts["max_positions"] == 16
    assert facts["tensors"]["classifier.weight"] == [2, 8]
    assert facts["tokenizer"] == {"largest_id": 11, "model_max_length": None}
    assert json.loads(json.dumps(facts)) == facts


def test_facts_do_not_depend_on_how_the_weights_are_sharded(inspect: Inspect, base_files: Files) -> None:
    whole = inspect(MODEL, base_files)
    tensors = list(tensors_of(CONFIG).items())
    shards = {"a.safetensors": dict(tensors[:9]), "b.safetensors": dict(tensors[9:])}
    index = {"weight_map": {name: shard for shard, part in shards.items() for name in part}}
    del base_files["model.safetensors"]
    base_files["model.safetensors.index.json"] = encode(index)
    base_files |= {shard: safetensors(part) for shard, part in shards.items()}
    sharded = inspect(MODEL, base_files)
    assert {**sharded, "size_bytes": 0} == {**whole, "size_bytes": 0}


@pytest.mark.parametrize(
    ("change", "reason", "mentions"),
    [
        ({"auto_map": {"AutoModel": "modeling.Evil"}}, "CODE_REFERENCE", "auto_map"),
        ({"trust_remote_code": True}, "CODE_REFERENCE", "trust_remote_code"),
        ({"_attn_implementation": "someone/kernel"}, "CODE_REFERENCE", "_attn_implementation"),
        ({"text_config": {"auto_map": {"AutoModel": "modeling.Evil"}}}, "CODE_REFERENCE", "auto_map"),
        ({"num_hidden_layers": 3}, "BAD_TENSORS", "layer.2"),
        ({"vocab_size": 13}, "BAD_TENSORS", "[12, 8]"),
        (
            {"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0, "b": 1, "c": 2}},
            "BAD_TENSORS",
            "classifier.weight",
        ),
    ],
)
def test_a_config_that_cannot_be_is_refused(
    inspect: Inspect, base_files: Files, change: dict[str, Any], reason: str, mentions: str
) -> None:
    base_files["config.json"] = encode(CONFIG | change)
    error = refuse(inspect, base_files)
    assert (error.reason, mentions in error.message) == (reason, True), error.message


@pytest.mark.parametrize(
    "change",
    [
        {"layer_norm_eps": 1e-05, "initializer_range": 0.02, "hidden_dropout_prob": 0, "classifier_dropout": 0.5},
        {"attention_probs_dropout_prob": 0.1, "classifier_dropout": None, "return_dict": True},
        {"pad_token_id": None, "torch_dtype": None, "dtype": "bfloat16", "chunk_size_feed_forward": 0},
        {"pad_token_id": 11, "torch_dtype": "float16"},
    ],
)
def test_the_values_that_transformers_itself_writes_are_taken(
    inspect: Inspect, base_files: Files, change: dict[str, Any]
) -> None:
    base_files["config.json"] = encode(CONFIG | change)
    assert inspect(MODEL, base_files)["warnings"] == []


@pytest.mark.parametrize(
    ("content", "mentions"),
    [
        (b"", "empty"),
        (b"[1]", "list"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        (b"<!DOCTYPE html><html>404</html>", "HTML"),
        (b"[" * 100_000, "nested"),
        (b'{"a": "' + b"x" * (1 << 20) + b'"}', "bytes"),
    ],
)
def test_a_config_that_is_no_object_is_named_as_what_it_is(
    inspect: Inspect, base_files: Files, content: bytes, mentions: str
) -> None:
    base_files["config.json"] = content
    assert mentions in refuse(inspect, base_files).message


def zip_archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("data.pkl", b"x")
    return buffer.getvalue()


PICKLE = pickle.dumps({"weight": 1})


@pytest.mark.parametrize(
    ("path", "content", "reason"),
    [
        ("pytorch_model.bin", b"anything", "PICKLE_FILE"),
        ("training_args.bin", PICKLE, "PICKLE_FILE"),
        ("sub/optimizer.PT", b"", "PICKLE_FILE"),
        ("notes.txt", PICKLE, "PICKLE_FILE"),
        ("notes.md", zip_archive(), "PICKLE_FILE"),
        ("modeling_evil.py", b"", "CODE_FILE"),
        ("lib.so", b"", "CODE_FILE"),
        ("model.onnx", b"", "UNSUPPORTED_WEIGHTS"),
        ("onnx/model.ONNX", b"", "UNSUPPORTED_WEIGHTS"),
        ("tf_model.h5", b"", "UNSUPPORTED_WEIGHTS"),
        ("model.onnx.data", b"", "UNSUPPORTED_WEIGHTS"),
        ("onnx/model.onnx_data", b"", "UNSUPPORTED_WEIGHTS"),
        ("model.ONNX_data_1", b"", "UNSUPPORTED_WEIGHTS"),
        ("adapter_config.json", b"{}", "BAD_CONFIG"),
        ("quantization.json", b"{}", "BAD_CONFIG"),
    ],
)
def test_what_could_run_or_would_ship_unread_is_refused(
    inspect: Inspect, base_files: Files, path: str, content: bytes, reason: str
) -> None:
    base_files[path] = content
    error = refuse(inspect, base_files)
    assert error.reason == reason
    assert path.rpartition("/")[2] in error.message


def test_a_pickle_under_a_safetensors_name_is_named_as_one(inspect: Inspect, base_files: Files) -> None:
    for content in (PICKLE, zip_archive()):
        base_files["model.safetensors"] = content
        error = refuse(inspect, base_files)
        assert error.reason == "PICKLE_FILE"
        assert "save_file" in error.message


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_counted_and_their_tensor_named(
    inspect: Inspect, base_files: Files, value: float
) -> None:
    tensors = tensors_of(CONFIG)
    tensors["bert.pooler.dense.weight"][3, 4:6] = value
    base_files["model.safetensors"] = safetensors(tensors)
    error = refuse(inspect, base_files)
    assert error.reason == "NON_FINITE_WEIGHTS"
    assert "'bert.pooler.dense.weight' holds 2 values" in error.message


@pytest.mark.parametrize("dtype", sorted(FINITE_MASKS))
def test_the_masks_agree_with_arithmetic_on_every_bit_pattern(dtype: str) -> None:
    import torch

    formats = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    formats |= {"F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu}
    width = np.dtype(FINITE_MASKS[dtype][0]).itemsize
    high = np.arange(1 << (8 * min(width, 2)), dtype=f"<u{min(width, 2)}")
    bits = np.concatenate([high.astype(f"<u{width}") << (8 * max(width - 2, 0)) | low for low in (0, 1)])
    bits = bits.astype(f"<u{width}")
    values = torch.from_numpy(bits).view(formats.get(dtype, torch.float32)).double()
    assert count_non_finite(bits.tobytes(), dtype) == int((~torch.isfinite(values)).sum())


def test_a_tensor_that_spans_store_chunks_is_read_whole(inspect: Inspect, base_files: Files) -> None:
    config = CONFIG | {"vocab_size": 50_001}
    tensors = tensors_of(config)
    tensors["bert.embeddings.word_embeddings.weight"][[0, 40_000, 50_000], 7] = np.nan
    base_files |= {"config.json": encode(config), "model.safetensors": safetensors(tensors)}
    assert "holds 3 values" in refuse(inspect, base_files).message


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "_fsdp_wrapped_module.", "module._orig_mod."])
def test_names_of_a_training_wrapper_are_refused_with_the_model_to_save_instead(
    inspect: Inspect, base_files: Files, wrapper: str
) -> None:
    tensors = {wrapper + name: value for name, value in tensors_of(CONFIG).items()}
    base_files["model.safetensors"] = safetensors(tensors)
    error = refuse(inspect, base_files)
    assert error.reason == "WRAPPED_WEIGHTS"
    assert "save" in error.message


def test_a_wrapper_inside_a_name_is_found_too(inspect: Inspect, base_files: Files) -> None:
    tensors = {name.replace("encoder.", "encoder._orig_mod."): value for name, value in tensors_of(CONFIG).items()}
    base_files["model.safetensors"] = safetensors(tensors)
    assert refuse(inspect, base_files).reason == "WRAPPED_WEIGHTS"


def test_a_missing_tensor_is_refused_and_a_further_one_too(inspect: Inspect, base_files: Files) -> None:
    tensors = tensors_of(CONFIG)
    base_files["model.safetensors"] = safetensors(tensors | {"cls.extra": np.zeros(3, np.float32)})
    error = refuse(inspect, base_files)
    assert (error.reason, error.field) == ("BAD_TENSORS", "cls.extra")
    del tensors["classifier.bias"]
    base_files["model.safetensors"] = safetensors(tensors)
    assert "'classifier.bias'" in refuse(inspect, base_files).message


def test_a_bare_encoder_is_told_to_be_saved_with_its_head(inspect: Inspect, base_files: Files) -> None:
    tensors = {name.removeprefix("bert."): value for name, value in tensors_of(CONFIG).items()}
    base_files["model.safetensors"] = safetensors(tensors)
    assert "head included" in refuse(inspect, base_files).message


def test_integer_weights_are_refused(inspect: Inspect, base_files: Files) -> None:
    base_files["model.safetensors"] = safetensors(tensors_of(CONFIG), dtype="I32")
    assert "is I32" in refuse(inspect, base_files).message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model.safetensors": None}, "NO_WEIGHTS"),
        ({"config.json": None}, "NO_CONFIG"),
        ({"tokenizer.json": b"{}"}, "BAD_TOKENIZER"),
        ({"tokenizer.json": encode({"model": {"vocab": {"a": -1}}})}, "BAD_TOKENIZER"),
        ({"tokenizer.json": encode({"model": {"vocab": {"a": 12}}})}, "BAD_TOKENIZER"),
        ({"tokenizer.json": None, "vocab.txt": b"w\n" * 13}, "BAD_TOKENIZER"),
        ({"tokenizer_config.json": encode({"added_tokens_decoder": {"12": {"content": "<new>"}}})}, "BAD_TOKENIZER"),
        ({"added_tokens.json": encode({"<new>": 12})}, "BAD_TOKENIZER"),
        ({"tokenizer_config.json": encode({"auto_map": {"AutoTokenizer": "x.y"}})}, "CODE_REFERENCE"),
        ({"model.safetensors.index.json": b"{}"}, "BAD_WEIGHT_FILES"),
        ({"adapter_model.safetensors": safetensors({"a": np.zeros(1, np.float32)})}, "BAD_WEIGHT_FILES"),
        ({"model.safetensors": None, "model.safetensors.index.json": b"{}"}, "BAD_WEIGHT_FILES"),
        ({"model.safetensors": None, "model.safetensors.index.json": b'{"weight_map": {"a": "../b"}}'}, "NO_WEIGHTS"),
    ],
)
def test_an_incomplete_folder_is_refused(
    inspect: Inspect, base_files: Files, changes: dict[str, bytes | None], reason: str
) -> None:
    files = {path: data for path, data in (base_files | changes).items() if data is not None}  # type: ignore[operator]
    assert refuse(inspect, files).reason == reason


def test_an_index_that_disagrees_with_its_shards_is_refused(inspect: Inspect, base_files: Files) -> None:
    tensors = tensors_of(CONFIG)
    base_files["a.safetensors"] = base_files.pop("model.safetensors")
    for weight_map in (
        dict.fromkeys([*tensors, "ghost"], "a.safetensors"),
        dict.fromkeys(list(tensors)[1:], "a.safetensors"),
    ):
        base_files["model.safetensors.index.json"] = encode({"weight_map": weight_map})
        assert refuse(inspect, base_files).reason == "BAD_WEIGHT_FILES"


def test_a_vocabulary_file_alone_is_a_tokenizer(inspect: Inspect, base_files: Files) -> None:
    del base_files["tokenizer.json"]
    base_files["vocab.txt"] = b"w\n" * 11 + b"w"
    base_files["tokenizer_config.json"] = encode({"model_max_length": int(1e30)})
    assert inspect(MODEL, base_files)["tokenizer"] == {"largest_id": 11, "model_max_length": None}


def test_only_callers_kinds_are_inspected(inspect: Inspect, base_files: Files) -> None:
    with pytest.raises(InvalidRequest, match="MODEL, ADAPTER, DATASET"):
        inspect(ArtifactKind.REPORT, base_files)


def test_the_table_of_families_is_that_of_the_compressors() -> None:
    from compressors.families import FAMILIES, task_of
    from service.intake.families import SUPPORTED

    assert SUPPORTED.keys() == FAMILIES.keys()
    for model_type, classes in SUPPORTED.items():
        for name, architecture in classes.items():
            assert task_of({"model_type": model_type, "architectures": [name]}) == architecture.task


def test_the_shapes_and_activations_are_those_of_transformers() -> None:
    from transformers import BertConfig, BertForSequenceClassification
    from transformers.activations import ACT2FN

    from service.intake.configs import ACTIVATIONS

    model = BertForSequenceClassification(BertConfig(**CONFIG))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert {name: value.shape for name, value in tensors_of(CONFIG).items()} == shapes
    assert set(ACT2FN) >= ACTIVATIONS
    assert TOKENIZER["model"]
