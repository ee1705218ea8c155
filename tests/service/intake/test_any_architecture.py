"""A model of any architecture is taken in for merging: it needs sound weights and a config without code, no more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from modelpress.errors import InvalidModel
from modelpress.manifests import ArtifactKind
from tests.service.intake.tiny import LLAMA, TOKENIZER, Files, Inspect, encode, llama_tensors, safetensors

MODEL = ArtifactKind.MODEL


@pytest.fixture
def llama_files() -> Files:
    return {"config.json": encode(LLAMA), "model.safetensors": safetensors(llama_tensors())}


def refuse(inspect: Inspect, files: Files) -> InvalidModel:
    with pytest.raises(InvalidModel) as caught:
        inspect(MODEL, files)
    return caught.value


def test_facts_are_what_config_and_headers_say(inspect: Inspect, llama_files: Files) -> None:
    facts = inspect(MODEL, llama_files)
    shapes = {name: list(value.shape) for name, value in llama_tensors().items()}
    assert facts["tensors"] == shapes
    assert (facts["model_type"], facts["architecture"]) == ("llama", "LlamaForCausalLM")
    assert (facts["task"], facts["labels"], facts["tokenizer"]) == (None, [], None)
    assert (facts["tie_word_embeddings"], facts["layers"], facts["quantization"]) == (False, 2, None)
    assert facts["dtypes"] == {"F32": len(shapes)}
    assert facts["largest_tensor_bytes"] == 4 * 8 * 16
    assert facts["obstacle"]["reason"] == "BAD_CONFIG"


def test_a_config_that_says_nothing_is_taken(inspect: Inspect, llama_files: Files) -> None:
    llama_files["config.json"] = b"{}"
    facts = inspect(MODEL, llama_files)
    names = ("model_type", "architecture", "tie_word_embeddings", "layers", "quantization")
    assert [facts[name] for name in names] == [None] * 5


def test_integers_and_truth_values_are_weights_too(inspect: Inspect, llama_files: Files) -> None:
    header = b'{"attn.bias": {"dtype": "BOOL", "shape": [2], "data_offsets": [0, 2]}, '
    header += b'"ids": {"dtype": "I16", "shape": [1], "data_offsets": [2, 4]}}'
    llama_files["model.safetensors"] = len(header).to_bytes(8, "little") + header + bytes(4)
    assert inspect(MODEL, llama_files)["dtypes"] == {"BOOL": 1, "I16": 1}


def test_shards_are_one_model(inspect: Inspect, llama_files: Files) -> None:
    whole = inspect(MODEL, llama_files)
    items = list(llama_tensors().items())
    del llama_files["model.safetensors"]
    for name, part in (("a", items[:3]), ("b", items[3:])):
        llama_files[f"{name}.safetensors"] = safetensors(dict(part))
    weight_map = {name: "a.safetensors" if i < 3 else "b.safetensors" for i, (name, _) in enumerate(items)}
    llama_files["model.safetensors.index.json"] = encode({"weight_map": weight_map})
    assert inspect(MODEL, llama_files)["tensors"] == whole["tensors"]


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            ("bitsandbytes", "nf4"),
        ),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ("bitsandbytes", "fp4")),
        ({"load_in_4bit": True}, ("bitsandbytes", None)),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, ("bitsandbytes", "int8")),
        ({"quant_method": "bitsandbytes"}, ("bitsandbytes", None)),
        ({"quant_method": "gptq", "bits": 4}, ("gptq", None)),
        ({"bits": 4}, ("an unnamed method", None)),
        ("yes", ("an unnamed method", None)),
        ({}, (None, None)),
    ],
)
def test_a_quantized_model_is_taken_and_says_how(
    inspect: Inspect, llama_files: Files, quantization: Any, expected: tuple[str | None, str | None]
) -> None:
    llama_files["config.json"] = encode(LLAMA | {"quantization_config": quantization})
    facts = inspect(MODEL, llama_files)
    assert (facts["quantization"], facts["quantization_type"]) == expected


@pytest.mark.parametrize(
    ("change", "reason", "mentions"),
    [
        ({"auto_map": {"AutoModel": "modeling.Evil"}}, "CODE_REFERENCE", "auto_map"),
        ({"trust_remote_code": True}, "CODE_REFERENCE", "trust_remote_code"),
        ({"vision_config": {"trust_remote_code": True}}, "CODE_REFERENCE", "trust_remote_code"),
        ({"vocab_size": 11}, "BAD_TOKENIZER", "11 rows"),
    ],
)
def test_code_and_another_model_s_tokenizer_are_refused_whatever_the_architecture(
    inspect: Inspect, llama_files: Files, change: dict[str, Any], reason: str, mentions: str
) -> None:
    llama_files["config.json"] = encode(LLAMA | change)
    llama_files["tokenizer.json"] = encode(TOKENIZER)
    error = refuse(inspect, llama_files)
    assert (error.reason, mentions in error.message) == (reason, True), error.message


def test_a_tokenizer_without_a_vocabulary_size_in_the_config_is_taken(inspect: Inspect, llama_files: Files) -> None:
    llama_files["config.json"] = encode({"model_type": "new"})
    llama_files["tokenizer.json"] = encode(TOKENIZER)
    facts = inspect(MODEL, llama_files)
    assert facts["tokenizer"]["largest_id"] == 11
    assert list(facts["vocabulary_files"]) == ["tokenizer.json"]


def test_values_that_are_not_finite_and_empty_shards_are_refused(inspect: Inspect, llama_files: Files) -> None:
    tensors = llama_tensors()
    tensors["model.norm.weight"][3] = np.nan
    llama_files["model.safetensors"] = safetensors(tensors)
    assert refuse(inspect, llama_files).reason == "NON_FINITE_WEIGHTS"
    tensors["model.norm.weight"] = np.zeros(0, np.float32)
    llama_files["model.safetensors"] = safetensors(tensors)
    error = refuse(inspect, llama_files)
    assert (error.reason, error.field) == ("EMPTY_TENSOR", "model.norm.weight")
    assert "stage3_gather_16bit_weights_on_model_save" in error.message


def test_a_wrapper_around_all_is_refused_and_a_submodule_of_its_name_is_the_model_s_own(
    inspect: Inspect, llama_files: Files
) -> None:
    tensors = llama_tensors()
    llama_files["model.safetensors"] = safetensors({f"module.{name}": value for name, value in tensors.items()})
    assert refuse(inspect, llama_files).reason == "WRAPPED_WEIGHTS"
    own = tensors | {"module.fc.weight": np.ones((2, 2), np.float32)}
    llama_files["model.safetensors"] = safetensors(own)
    assert "module.fc.weight" in inspect(MODEL, llama_files)["tensors"]


@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight"])
def test_a_tensor_with_and_without_a_wrapper_s_name_is_ambiguous(
    inspect: Inspect, llama_files: Files, name: str
) -> None:
    tensors = llama_tensors()
    llama_files["model.safetensors"] = safetensors(tensors | {f"module.{name}": tensors[name] + 1})
    error = refuse(inspect, llama_files)
    assert (error.reason, error.field) == ("AMBIGUOUS_NAMES", name)
    assert f"'module.{name}' and '{name}'" in error.message
