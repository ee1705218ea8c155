"""An adapter that is taken in is one that PEFT saved, whole and finite; of a LoRA every pair is complete."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compressors.adapter_config import read_adapter_settings
from modelpress.errors import InvalidModel
from modelpress.manifests import ArtifactKind
from service.intake.lora_tensors import sort_tensors
from tests.service.intake.tiny import ADAPTER_CONFIG, Files, Inspect, adapter_tensors, encode, safetensors

ADAPTER = ArtifactKind.ADAPTER
QUERY = "bert.encoder.layer.0.attention.self.query"
PREFIX = f"base_model.model.{QUERY}"
WORDS = "base_model.model.bert.embeddings.word_embeddings"


def refuse(inspect: Inspect, files: Files) -> InvalidModel:
    with pytest.raises(InvalidModel) as caught:
        inspect(ADAPTER, files)
    return caught.value


def test_facts_are_every_tensor_s_shape_and_where_the_adapter_is(inspect: Inspect, adapter_files: Files) -> None:
    facts = inspect(ADAPTER, adapter_files)
    assert facts["config"] == {"target_modules": ["query"]}
    assert facts["tensors"] == {name: list(value.shape) for name, value in adapter_tensors().items()}
    assert facts["parameters"] == 2 * (16 + 16) + 16
    assert facts["peft_type"] == "LORA"


def test_tensors_are_sorted_by_what_they_are_on_whatever_wrapper_they_were_saved_under() -> None:
    shapes = {
        f"{PREFIX}.lora_A.weight": [2, 8],
        f"{PREFIX}.lora_B.weight": [8, 2],
        f"{PREFIX}.lora_magnitude_vector": [8],
        f"{PREFIX}.base_layer.bias": [8],
        "base_model.model.classifier.modules_to_save.default.bias": [2],
        "base_model.model.classifier.original_module.bias": [2],
        "base_model.model.embed_tokens.token_adapter.trainable_tokens_delta": [1, 8],
    }
    for wrapper in ("", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "_fsdp_wrapped_module."):
        found = sort_tensors({wrapper + name: shape for name, shape in shapes.items()}, {"bias": "all"})
        assert found.whole == {f"{QUERY}.bias": [8], "classifier.bias": [2]}
        assert set(found.modules[QUERY].parts) == {"lora_A.weight", "lora_B.weight", "lora_magnitude_vector"}
        assert found.modules[QUERY].shape("lora_A.weight") == [2, 8]
        assert found.unknown == []


def test_a_wrapper_s_name_inside_is_the_model_s_own() -> None:
    name = "base_model.model.module.fc.lora_A.weight"
    assert list(sort_tensors({name: [2, 8]}, {}).modules) == ["module.fc"]


@pytest.mark.parametrize(
    ("change", "reason", "mentions"),
    [
        ({"peft_type": "PROMPT_TUNING"}, "BAD_ADAPTER", "PROMPT_TUNING"),
        ({"peft_type": "NEW"}, "BAD_ADAPTER", "known: LORA, "),
        ({"peft_type": None}, "BAD_ADAPTER", "peft_type"),
        ({"r": 3}, "BAD_ADAPTER", "[3]"),
        ({"r": True}, "BAD_ADAPTER", "r: "),
        ({"rank_pattern": {"query": "x"}}, "BAD_ADAPTER", "rank_pattern"),
        ({"lora_alpha": "x"}, "BAD_ADAPTER", "lora_alpha"),
        ({"lora_alpha": None}, "BAD_ADAPTER", "lora_alpha"),
        ({"megatron_config": {"a": 1}}, "CODE_REFERENCE", "megatron_config"),
        ({"auto_map": {"a": "b"}}, "CODE_REFERENCE", "auto_map"),
        ({"layer_replication": [[0, 2]]}, "BAD_ADAPTER", "layer_replication"),
        ({"use_dora": True}, "BAD_ADAPTER", "lora_magnitude_vector"),
        ({"init_lora_weights": "pissa"}, "BAD_ADAPTER", "init_lora_weights"),
        ({"alpha_pattern": {"query": "x"}}, "BAD_ADAPTER", "alpha_pattern"),
        ({"r": 65_537}, "BAD_ADAPTER", "65536"),
        ({"rank_pattern": {"query": 65_537}}, "BAD_ADAPTER", "at most 65536"),
        ({"rank_pattern": {"(" * 10_000: 2}}, "BAD_ADAPTER", "at most 1024 patterns of 4096 characters"),
        ({"target_modules": []}, "BAD_ADAPTER", "target_modules"),
        ({"task_type": "NEW"}, "BAD_ADAPTER", "SEQ_CLS"),
    ],
)
def test_a_config_that_cannot_be_is_refused(
    inspect: Inspect, adapter_files: Files, change: dict[str, Any], reason: str, mentions: str
) -> None:
    adapter_files["adapter_config.json"] = encode(ADAPTER_CONFIG | change)
    error = refuse(inspect, adapter_files)
    assert error.reason == reason
    assert mentions in error.message


def test_a_rank_pattern_allows_its_ranks(inspect: Inspect, adapter_files: Files) -> None:
    adapter_files["adapter_config.json"] = encode(ADAPTER_CONFIG | {"r": 8, "rank_pattern": {"layer.0.*": 2}})
    assert inspect(ADAPTER, adapter_files)["parameters"]


@pytest.mark.parametrize("peft_type", ["LORA", "LOHA"])
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("target_modules", "(query"),
        ("exclude_modules", "(query"),
        ("layers_pattern", ["(query"]),
        ("modules_to_save", ["(query"]),
        ("rank_pattern", {"(query": 2}),
        ("alpha_pattern", {"(query": 2}),
    ],
)
def test_patterns_of_whoever_made_the_adapter_are_left_to_the_merge(
    inspect: Inspect, adapter_files: Files, peft_type: str, setting: str, value: Any
) -> None:
    """None of them is compiled by the service: one would hold up all that it serves."""
    config = ADAPTER_CONFIG | {"peft_type": peft_type, setting: value}
    adapter_files["adapter_config.json"] = encode(config)
    assert inspect(ADAPTER, adapter_files)["peft_type"] == peft_type
    with pytest.raises(InvalidModel, match="not a regular expression") as caught:
        read_adapter_settings(config)
    assert caught.value.field == setting


@pytest.mark.parametrize(
    ("name", "value", "mentions"),
    [
        (f"{PREFIX}.lora_A.weight", None, "lora_A"),
        (f"{PREFIX}.lora_B.weight", None, "lora_B"),
        (f"{PREFIX}.lora_B.weight", np.ones((8, 3), np.float32), "rank"),
        (f"{PREFIX}.lora_A.weight", np.ones((2, 8, 1, 1), np.float32), "[2, 8, 1, 1]"),
        (f"{PREFIX}.lora_A.weight", np.ones(2, np.float32), "[2]"),
        (f"{PREFIX}.lora_magnitude_vector", np.ones(8, np.float32), "use_dora is not true"),
        (f"{WORDS}.lora_embedding_A", np.ones((2, 12), np.float32), "lora_embedding_B"),
        (f"{PREFIX}.lora_embedding_A", np.ones((2, 12), np.float32), "one pair of factors"),
        ("base_model.model.a.lora_magnitude_vector", np.ones(2, np.float32), "one pair of factors"),
        (f"{WORDS}.lora_embedding_B", np.ones((8, 2), np.float32), "lora_embedding_A"),
        (f"{PREFIX}.lora_A.bias", np.ones(2, np.float32), "lora_A.bias"),
        (f"{PREFIX}.lora_A.default.weight", np.ones((2, 8), np.float32), "lora_A.default"),
        ("transformer.h.0.lora_A.weight", np.ones((2, 8), np.float32), "base_model.model."),
        ("module.transformer.h.0.lora_A.weight", np.ones((2, 8), np.float32), "base_model.model."),
    ],
)
def test_tensors_that_make_no_whole_adapter_are_refused(
    inspect: Inspect, adapter_files: Files, name: str, value: Any, mentions: str
) -> None:
    tensors = adapter_tensors() | {name: value}
    adapter_files["adapter_model.safetensors"] = safetensors({k: v for k, v in tensors.items() if v is not None})
    error = refuse(inspect, adapter_files)
    assert error.reason == "BAD_ADAPTER"
    assert mentions in error.message


def pair(module: str, a: tuple[int, ...], b: tuple[int, ...], *, kind: str = ".weight") -> dict[str, Any]:
    """Ones in the shapes of lora_A and lora_B, or of lora_embedding_A and _B."""
    first, second = (
        ("lora_A.weight", "lora_B.weight") if kind == ".weight" else ("lora_embedding_A", "lora_embedding_B")
    )
    return {f"{module}.{first}": np.ones(a, np.float32), f"{module}.{second}": np.ones(b, np.float32)}


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        (pair(WORDS, (2, 12), (8, 2), kind="embedding"), {}),
        (pair("base_model.model.conv", (2, 8, 3), (8, 2, 1)), {}),
        (pair("base_model.model.conv", (4, 8, 3, 3), (8, 2, 1, 1)), {"r": 4}),
        (pair("base_model.model.conv", (2, 8, 3, 3, 3), (8, 2, 1, 1, 1)), {}),
        (pair("base_model.model.mlp.experts", (6, 8), (4, 6)), {"target_parameters": ["mlp.experts.down_proj"]}),
        (pair("base_model.model.mlp.experts.base_layer", (6, 8), (4, 6)), {"target_parameters": ["experts.up"]}),
        ({f"module._orig_mod.{name}": value for name, value in adapter_tensors().items()}, {}),
        (pair(PREFIX.replace("bert.", "_fsdp_wrapped_module.bert._fsdp_wrapped_module."), (2, 8), (8, 2)), {}),
        (
            pair(PREFIX, (2, 8), (8, 2)) | {f"{PREFIX}.lora_magnitude_vector.weight": np.ones(8, np.float32)},
            {"use_dora": True},
        ),
        (
            pair(PREFIX, (2, 8), (8, 2)) | {f"{PREFIX}.lora_magnitude_vector": np.ones(8, np.float32)},
            {"use_dora": True},
        ),
        (
            {f"{WORDS}.token_adapter.trainable_tokens_delta": np.ones((1, 8), np.float32)},
            {"trainable_token_indices": [1]},
        ),
    ],
)
def test_every_form_that_peft_saves_a_lora_in_is_taken(
    inspect: Inspect, adapter_files: Files, tensors: dict[str, Any], config: dict[str, Any]
) -> None:
    adapter_files["adapter_config.json"] = encode(ADAPTER_CONFIG | config)
    adapter_files["adapter_model.safetensors"] = safetensors(tensors)
    assert set(inspect(ADAPTER, adapter_files)["tensors"]) == set(tensors)


def test_a_rank_of_fused_experts_that_is_no_multiple_is_refused(inspect: Inspect, adapter_files: Files) -> None:
    adapter_files["adapter_config.json"] = encode(ADAPTER_CONFIG | {"target_parameters": ["mlp.experts.down_proj"]})
    adapter_files["adapter_model.safetensors"] = safetensors(pair("base_model.model.mlp.experts", (5, 8), (4, 5)))
    assert "[5, 8]" in refuse(inspect, adapter_files).message


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"peft_type": "IA3", "target_modules": ["query"], "feedforward_modules": []}, [f"{PREFIX}.ia3_l"]),
        ({"peft_type": "LOHA", "target_modules": ["query"], "r": 2}, [f"{PREFIX}.hada_w1_a", f"{PREFIX}.hada_w1_b"]),
        ({"peft_type": "VERA", "target_modules": ["query"]}, [f"{PREFIX}.vera_lambda_b", "base_model.vera_A"]),
    ],
)
def test_peft_s_other_kinds_are_taken_and_left_to_the_merge(
    inspect: Inspect, adapter_files: Files, config: dict[str, Any], names: list[str]
) -> None:
    adapter_files["adapter_config.json"] = encode(config)
    adapter_files["adapter_model.safetensors"] = safetensors({name: np.ones(8, np.float32) for name in names})
    assert inspect(ADAPTER, adapter_files)["peft_type"] == config["peft_type"]


def test_a_wrapper_around_another_kind_is_refused_as_the_merge_does(inspect: Inspect, adapter_files: Files) -> None:
    adapter_files["adapter_config.json"] = encode(ADAPTER_CONFIG | {"peft_type": "LOHA"})
    adapter_files["adapter_model.safetensors"] = safetensors({f"module.{PREFIX}.hada_w1_a": np.ones(8, np.float32)})
    assert "base_model.model." in refuse(inspect, adapter_files).message


def test_an_empty_shard_is_refused_with_its_name_and_the_setting_that_helps(
    inspect: Inspect, adapter_files: Files
) -> None:
    adapter_files["adapter_model.safetensors"] = safetensors(pair(PREFIX, (2, 8), (0,)))
    error = refuse(inspect, adapter_files)
    assert error.reason == "EMPTY_TENSOR"
    assert f"{PREFIX}.lora_B.weight" in error.message
    assert "stage3_gather_16bit_weights_on_model_save" in error.message


def test_a_missing_half_is_named_with_the_half_that_is_there(inspect: Inspect, adapter_files: Files) -> None:
    tensors = adapter_tensors()
    del tensors[f"{PREFIX}.lora_B.weight"]
    adapter_files["adapter_model.safetensors"] = safetensors(tensors)
    message = refuse(inspect, adapter_files).message
    assert f"'{PREFIX}.lora_A.weight'" in message
    assert "no lora_B.weight" in message


def test_an_adapter_without_lora_matrices_is_refused(inspect: Inspect, adapter_files: Files) -> None:
    adapter_files["adapter_model.safetensors"] = safetensors(
        {"base_model.model.classifier.bias": np.ones(2, np.float32)}
    )
    assert "nothing could be merged" in refuse(inspect, adapter_files).message


def test_values_that_are_not_finite_are_refused(inspect: Inspect, adapter_files: Files) -> None:
    tensors = adapter_tensors()
    tensors[f"{PREFIX}.lora_B.weight"][1, 1] = np.inf
    adapter_files["adapter_model.safetensors"] = safetensors(tensors)
    assert refuse(inspect, adapter_files).reason == "NON_FINITE_WEIGHTS"


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"adapter_model.bin": b"x"}, "PICKLE_FILE"),
        ({"adapter_model.safetensors": None}, "NO_WEIGHTS"),
        ({"adapter_config.json": None}, "NO_CONFIG"),
        ({"model.safetensors": safetensors({"a": np.ones(1, np.float32)})}, "BAD_WEIGHT_FILES"),
        ({"train.py": b""}, "CODE_FILE"),
    ],
)
def test_a_folder_that_is_no_adapter_is_refused(
    inspect: Inspect, adapter_files: Files, files: dict[str, bytes | None], reason: str
) -> None:
    merged: dict[str, bytes | None] = {**adapter_files, **files}
    assert refuse(inspect, {k: v for k, v in merged.items() if v is not None}).reason == reason
