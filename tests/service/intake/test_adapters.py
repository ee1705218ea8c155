"""An adapter that is taken in is a whole, finite PEFT LoRA, and its facts say which weights it needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from modelpress.errors import InvalidModel
from modelpress.manifests import ArtifactKind
from tests.service.intake.tiny import ADAPTER_CONFIG, Files, Inspect, adapter_tensors, encode, safetensors

ADAPTER = ArtifactKind.ADAPTER
QUERY = "bert.encoder.layer.0.attention.self.query"
PREFIX = f"base_model.model.{QUERY}"


def refuse(inspect: Inspect, files: Files) -> InvalidModel:
    with pytest.raises(InvalidModel) as caught:
        inspect(ADAPTER, files)
    return caught.value


def test_facts_name_each_module_with_the_weight_that_it_needs(inspect: Inspect, adapter_files: Files) -> None:
    facts = inspect(ADAPTER, adapter_files)
    assert facts["modules"][QUERY] == {"rank": 2, "weight": [8, 8]}
    assert len(facts["modules"]) == 2
    assert facts["saved"] == {"classifier.weight": [2, 8]}
    assert facts["parameters"] == 2 * (16 + 16) + 16
    assert facts["target_modules"] == ["query"]


def test_biases_are_facts_under_the_base_s_names_whatever_wrapper_peft_saved_them_under(
    inspect: Inspect, adapter_files: Files
) -> None:
    bias, head = np.ones(8, np.float32), np.ones(2, np.float32)
    tensors = adapter_tensors() | {
        f"{PREFIX}.base_layer.bias": bias,
        "base_model.model.bert.pooler.dense.bias": bias,
        "base_model.model.classifier.modules_to_save.default.bias": head,
        "base_model.model.classifier.original_module.bias": head,
    }
    adapter_files["adapter_model.safetensors"] = safetensors(tensors)
    adapter_files["adapter_config.json"] = encode(ADAPTER_CONFIG | {"bias": "all"})
    assert inspect(ADAPTER, adapter_files)["saved"] == {
        f"{QUERY}.bias": [8],
        "bert.pooler.dense.bias": [8],
        "classifier.bias": [2],
        "classifier.weight": [2, 8],
    }


@pytest.mark.parametrize(
    ("change", "reason", "mentions"),
    [
        ({"peft_type": "IA3"}, "BAD_ADAPTER", "LORA"),
        ({"r": 3}, "BAD_ADAPTER", "[3]"),
        ({"r": True}, "BAD_ADAPTER", "rank_pattern"),
        ({"rank_pattern": {"query": "x"}}, "BAD_ADAPTER", "rank_pattern"),
        ({"lora_alpha": "x"}, "BAD_ADAPTER", "lora_alpha"),
        ({"megatron_config": {"a": 1}}, "CODE_REFERENCE", "megatron_config"),
        ({"auto_map": {"a": "b"}}, "CODE_REFERENCE", "auto_map"),
        ({"layer_replication": [[0, 2]]}, "BAD_ADAPTER", "layer_replication"),
        ({"use_dora": True}, "BAD_ADAPTER", "use_dora"),
        ({"init_lora_weights": "pissa"}, "BAD_ADAPTER", "init_lora_weights"),
        ({"trainable_token_indices": [1]}, "BAD_ADAPTER", "trainable_token_indices"),
        ({"alpha_pattern": {"query": "x"}}, "BAD_ADAPTER", "alpha_pattern"),
        ({"rank_pattern": {"(" * 10_000: 2}}, "BAD_ADAPTER", "regular expression"),
        ({"target_modules": []}, "BAD_ADAPTER", "target_modules"),
        ({"task_type": "CAUSAL_LM"}, "BAD_ADAPTER", "SEQ_CLS"),
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
    assert inspect(ADAPTER, adapter_files)["modules"][QUERY]["rank"] == 2


@pytest.mark.parametrize(
    ("name", "value", "mentions"),
    [
        (f"{PREFIX}.lora_A.weight", None, "lora_A"),
        (f"{PREFIX}.lora_B.weight", None, "lora_B"),
        (f"{PREFIX}.lora_B.weight", np.ones((8, 3), np.float32), "rank"),
        (f"{PREFIX}.lora_A.weight", np.ones((2, 8, 1, 1), np.float32), "only linear layers"),
        (f"{PREFIX}.lora_magnitude_vector", np.ones(8, np.float32), "only LoRA on linear layers"),
        (
            "base_model.model.bert.embeddings.word_embeddings.lora_embedding_A",
            np.ones((2, 12), np.float32),
            "embedding",
        ),
        (f"{PREFIX}.lora_A.bias", np.ones(2, np.float32), "lora_A.bias"),
        (f"{PREFIX}.lora_A.default.weight", np.ones((2, 8), np.float32), "lora_A.default"),
        ("transformer.h.0.lora_A.weight", np.ones((2, 8), np.float32), "base_model.model."),
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
