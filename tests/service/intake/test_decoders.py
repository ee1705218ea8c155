"""A decoder of a known family is one that every stage for language models can take, once its weights are as its config
says; else the obstacle says what is wrong, and a merge still takes it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from compressors.decoder_families import DECODERS
from modelpress.errors import InvalidModel
from modelpress.manifests import ArtifactKind
from service.intake.decoders import decoder_shapes, read_decoder
from tests.service.intake.tiny import TOKENIZER, Files, Inspect, encode, safetensors

SIZES: dict[str, Any] = {
    "vocab_size": 12,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}


def config(model_type: str = "llama", **changes: Any) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [DECODERS[model_type].architecture], **SIZES, **changes}


def decoder_files(settings: dict[str, Any], **tensors: Any) -> Files:
    """A folder with seeded weights in the shapes that the config asks for; `tensors` changes or (None) removes some."""
    generator = np.random.default_rng(0)
    shapes = decoder_shapes(settings, read_decoder(settings))
    weights = {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()} | tensors
    return {
        "config.json": encode(settings),
        "model.safetensors": safetensors({name: value for name, value in weights.items() if value is not None}),
        "tokenizer.json": encode(TOKENIZER),
    }


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        *((model_type, {}) for model_type in DECODERS),
        ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 8, "tie_word_embeddings": False}),
        ("llama", {"num_key_value_heads": None}),
        ("mistral", {"head_dim": 6}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("qwen3", {"head_dim": 8, "attention_bias": True}),
    ],
)
def test_the_shapes_are_those_of_transformers(model_type: str, changes: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    settings = config(model_type, **changes)
    fields = {name: value for name, value in settings.items() if name not in ("model_type", "architectures")}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**fields))
    stored = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if settings["tie_word_embeddings"]:
        del stored["lm_head.weight"]
    assert dict(decoder_shapes(settings, read_decoder(settings))) == stored


@pytest.mark.parametrize("model_type", DECODERS)
def test_a_complete_decoder_is_for_text_generation(inspect: Inspect, model_type: str) -> None:
    facts = inspect(ArtifactKind.MODEL, decoder_files(config(model_type)))
    assert (facts["task"], facts["labels"], facts["obstacle"]) == ("text-generation", [], None)
    sizes = ("vocabulary", "hidden", "layers", "heads", "kv_heads", "ffn", "max_positions")
    assert [facts[name] for name in sizes] == [12, 16, 2, 4, 2, 24, 32]
    assert facts["head_dim"] == (128 if model_type == "qwen3" else 4)
    assert (facts["dtype"], facts["other_dtypes"]) == ("F32", {})


@pytest.mark.parametrize(
    ("change", "reason", "mentions"),
    [
        ({"architectures": ["LlamaModel"]}, "UNKNOWN_ARCHITECTURE", "LlamaForCausalLM"),
        ({"hidden_size": 18}, "BAD_CONFIG", "num_attention_heads is 4, which does not divide hidden_size 18"),
        ({"num_key_value_heads": 3}, "BAD_CONFIG", "num_key_value_heads is 3, which does not divide"),
        ({"num_hidden_layers": 0}, "BAD_CONFIG", "num_hidden_layers"),
        ({"max_position_embeddings": 4}, "BAD_CONFIG", "from 8"),
        ({"hidden_act": "evil"}, "BAD_CONFIG", "silu"),
        ({"rms_norm_eps": 0.0}, "BAD_CONFIG", "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "BAD_CONFIG", "true or false"),
        ({"attention_bias": 1}, "BAD_CONFIG", "attention_bias"),
        ({"rope_theta": -1.0}, "BAD_CONFIG", "rope_theta is -1.0: it must be a number above 0"),
        ({"rope_parameters": {"rope_type": "bogus"}}, "BAD_CONFIG", "rope_parameters has rope_type 'bogus': use one"),
        ({"rope_scaling": {"type": "linear"}}, "BAD_CONFIG", "rope_scaling has factor None: 'linear' needs a number"),
        ({"rope_scaling": 2}, "BAD_CONFIG", "rope_scaling is '2': it must be an object"),
        ({"quantization_config": {"quant_method": "gptq"}}, "BAD_CONFIG", "quantization_config"),
        ({"tie_word_embeddings": False}, "BAD_TENSORS", "lm_head.weight"),
        ({"intermediate_size": 32}, "BAD_TENSORS", "mlp.gate_proj.weight"),
    ],
)
def test_what_stages_cannot_take_is_an_obstacle(
    inspect: Inspect, change: dict[str, Any], reason: str, mentions: str
) -> None:
    files = decoder_files(config())
    files["config.json"] = encode(config(**change))
    facts = inspect(ArtifactKind.MODEL, files)
    assert facts["task"] is None
    assert (facts["obstacle"]["reason"], mentions in facts["obstacle"]["message"]) == (reason, True), facts["obstacle"]


def test_a_decoder_without_a_tokenizer_has_an_obstacle(inspect: Inspect) -> None:
    files = decoder_files(config())
    del files["tokenizer.json"]
    assert inspect(ArtifactKind.MODEL, files)["obstacle"]["reason"] == "NO_TOKENIZER"


def test_a_tensor_too_many_is_an_obstacle_unless_nothing_reads_it(inspect: Inspect) -> None:
    unread = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    unread["lm_head.weight"] = np.ones((12, 16), np.float32)
    assert inspect(ArtifactKind.MODEL, decoder_files(config(), **unread))["obstacle"] is None
    bias = {"model.layers.0.self_attn.q_proj.bias": np.ones(16, np.float32)}
    assert "q_proj.bias" in inspect(ArtifactKind.MODEL, decoder_files(config(), **bias))["obstacle"]["message"]


def test_the_dtypes_that_differ_are_kept_by_name(inspect: Inspect) -> None:
    files = decoder_files(config())
    norm = "model.layers.0.input_layernorm.weight"
    header_end = files["model.safetensors"].index(b'"F32"', files["model.safetensors"].index(norm.encode()))
    changed = files["model.safetensors"][:header_end] + b'"I32"' + files["model.safetensors"][header_end + 5 :]
    facts = inspect(ArtifactKind.MODEL, files | {"model.safetensors": changed})
    assert (facts["dtype"], facts["other_dtypes"]) == ("F32", {norm: "I32"})


@pytest.mark.parametrize(
    ("generation", "sentence"),
    [
        (b"{", "generation_config.json is not valid JSON"),
        (b"[]", "generation_config.json"),
        (encode({"eos_token_id": "x"}), "eos_token_id holds 'x': it must be a token id or a list of them"),
        (encode({"eos_token_id": [2, -1]}), "eos_token_id holds '-1'"),
    ],
)
def test_a_generation_config_that_ends_nothing_is_refused(inspect: Inspect, generation: bytes, sentence: str) -> None:
    with pytest.raises(InvalidModel) as caught:
        inspect(ArtifactKind.MODEL, decoder_files(config()) | {"generation_config.json": generation})
    assert sentence in caught.value.message


@pytest.mark.parametrize("ids", [None, 0, [1, 2]])
def test_a_generation_config_with_ids_is_taken(inspect: Inspect, ids: Any) -> None:
    files = decoder_files(config()) | {"generation_config.json": encode({"eos_token_id": ids})}
    assert inspect(ArtifactKind.MODEL, files)["obstacle"] is None


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1_000_000, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 4}},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        },
    ],
)
def test_the_kinds_of_positions_that_models_have_are_taken(inspect: Inspect, rope: dict[str, Any]) -> None:
    files = decoder_files(config())
    files["config.json"] = encode(config(**rope))
    assert inspect(ArtifactKind.MODEL, files)["obstacle"] is None
