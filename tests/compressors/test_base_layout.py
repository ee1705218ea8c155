"""Where a base keeps what adapters name: the tables say what transformers' own models have."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.pytorch_utils import Conv1D

from compressors.base_layout import BaseLayout, is_outside_layers
from compressors.model_layouts import CONV1D_MODULES
from compressors.weight_files import WeightFiles, read_json
from tests.compressors.lora_merges import TOKENS, WIDTH, Bases, Bench

SMALL = {
    "gpt2": ("GPT2Config", "GPT2Model", {"n_embd": 8, "n_layer": 1, "n_head": 2, "add_cross_attention": True}),
    "openai-gpt": ("OpenAIGPTConfig", "OpenAIGPTModel", {"n_embd": 8, "n_layer": 1, "n_head": 2}),
    "imagegpt": ("ImageGPTConfig", "ImageGPTModel", {"n_embd": 8, "n_layer": 1, "n_head": 2}),
    "decision_transformer": (
        "DecisionTransformerConfig",
        "DecisionTransformerModel",
        {"hidden_size": 8, "n_layer": 1, "n_head": 2, "state_dim": 3, "act_dim": 2},
    ),
}


def layout(bases: Bases, bench: Bench, kind: str, **changes: Any) -> BaseLayout:
    source = bench.source(bases.folder(kind))
    return BaseLayout(read_json(source, "config.json") | changes, WeightFiles.read(source))


@pytest.mark.parametrize("model_type", SMALL)
def test_the_conv1d_of_a_model_type_are_those_of_its_class(model_type: str, bases: Bases, bench: Bench) -> None:
    config, model, sizes = SMALL[model_type]
    with torch.device("meta"):
        made = getattr(transformers, model)(getattr(transformers, config)(**sizes))
    told = layout(bases, bench, "llama", model_type=model_type)

    for name, module in made.named_modules():
        if isinstance(module, (Conv1D, torch.nn.Linear)):
            assert told.is_conv1d(name) == isinstance(module, Conv1D), name


def test_no_other_model_of_transformers_has_conv1d() -> None:
    models = Path(inspect.getfile(transformers)).parent / "models"
    users = {path.parent.name for path in models.glob("*/modeling_*.py") if " Conv1D(" in path.read_text()}

    assert {
        user.replace("openai", "openai-gpt") if user == "openai" else user for user in users
    } <= CONV1D_MODULES.keys()
    assert users


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_fused_experts_have_the_shape_of_the_loaded_model(kind: str, bases: Bases, bench: Bench) -> None:
    told, parameters = layout(bases, bench, kind), dict(bases.model(kind).named_parameters())

    for name in ("model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"):
        found = told.find(name) or told.find_fused(name)
        assert found is not None
        assert found.shape == tuple(parameters[name].shape)
    assert told.has_transposed_experts == (kind == "gpt_oss")


def test_parts_of_fused_experts_are_in_the_order_of_the_loaded_model(bases: Bases, bench: Bench) -> None:
    told = layout(bases, bench, "mixtral")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    fused = told.find_fused(name)
    assert fused is not None

    stacked = torch.stack([torch.cat([told.files.load(part.name) for part in expert]) for expert in fused.parts])

    assert torch.equal(stacked, bases.model("mixtral").get_parameter(name))
    assert told.find_fused("model.layers.0.mlp.experts.other") is None
    assert told.find_fused("model.layers.7.mlp.experts.down_proj") is None


@pytest.mark.parametrize("kind", ["llama", "tied", "biased", "mixtral", "gpt_oss", "gpt2", "mamba"])
def test_every_parameter_of_the_loaded_model_is_found(kind: str, bases: Bases, bench: Bench) -> None:
    told = layout(bases, bench, kind)

    for name, parameter in bases.model(kind).named_parameters(remove_duplicate=False):
        found = told.find(name) or told.find_fused(name)
        assert found is not None, name
        assert found.shape == tuple(parameter.shape), name


def test_a_tied_head_is_found_at_the_embedding(bases: Bases, bench: Bench) -> None:
    tied, apart = layout(bases, bench, "tied"), layout(bases, bench, "llama")

    assert tied.find("lm_head.weight") == tied.tensors["model.embed_tokens.weight"]
    assert tied.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert (apart.tied, apart.may_be_tied) == ({}, tied.may_be_tied)
    assert layout(bases, bench, "tied", tie_word_embeddings=False).find("lm_head.weight") is None


def test_what_a_config_leaves_out_is_its_class_default(bases: Bases, bench: Bench) -> None:
    source = bench.source(bases.folder("gpt2"))
    config = {name: value for name, value in read_json(source, "config.json").items() if name != "tie_word_embeddings"}

    assert BaseLayout(config, WeightFiles.read(source)).tied == {"lm_head.weight": "transformer.wte.weight"}


@pytest.mark.parametrize(
    "architectures",
    [
        *(None, [], ["NoSuchModel"], ["BertModel"], ["PreTrainedTokenizer"]),
        *("LlamaForCausalLM", 5, {"a": 1}, [["LlamaForCausalLM"]], [None], [5]),
    ],
    ids=str,
)
def test_a_class_that_is_not_of_the_type_is_none(architectures: object, bases: Bases, bench: Bench) -> None:
    told = layout(bases, bench, "tied", architectures=architectures)

    assert (told.model_class, told.may_be_tied) == (None, {})


def test_the_vocabulary_is_the_configs(bases: Bases, bench: Bench) -> None:
    assert layout(bases, bench, "llama").vocabulary == TOKENS
    assert layout(bases, bench, "llama", vocab_size="64").vocabulary is None
    source = bench.source(bases.folder("llama"))
    assert BaseLayout({"text_config": {"vocab_size": WIDTH}}, WeightFiles.read(source)).vocabulary == WIDTH


@pytest.mark.parametrize(
    ("name", "outside"),
    [("lm_head.weight", True), ("model.layers.0.mlp.weight", False), ("h.10.ln", False), ("bert.pooler.dense", True)],
)
def test_numbered_layers_are_told_by_their_names(name: str, outside: bool) -> None:
    assert is_outside_layers(name) == outside
