"""Every kind of LoRA: the merged model, saved and loaded again, gives the logits of base plus adapter run by PEFT."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compressors.lora_merges import TOKENS, Bases, Bench, distance, logits, save, train

LINEAR = ["q_proj", "v_proj", "down_proj"]
QUERY, HEAD, EMBEDDING = ["q_proj"], ["lm_head"], ["embed_tokens"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", {"target_modules": LINEAR}),
    "all-linear": ("llama", {"target_modules": "all-linear"}),
    "rslora": ("llama", {"target_modules": LINEAR, "use_rslora": True}),
    "rslora with ranks": ("llama", {"target_modules": LINEAR, "use_rslora": True, "rank_pattern": {"q_proj": 9}}),
    "dora": ("llama", {"target_modules": LINEAR, "use_dora": True}),
    "dora and rslora": ("llama", {"target_modules": LINEAR, "use_dora": True, "use_rslora": True}),
    "alpha as rank": ("llama", {"target_modules": LINEAR, "lora_alpha": 4}),
    "ranks and alphas": (
        "llama",
        {"target_modules": LINEAR, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.mlp.down_proj": 3}},
    ),
    "patterns in order": ("llama", {"target_modules": LINEAR, "rank_pattern": {r"layers\.0\..*": 3, "q_proj": 2}}),
    "layers": ("llama", {"target_modules": LINEAR, "layers_to_transform": [1]}),
    "layers of a pattern": (
        "llama",
        {"target_modules": LINEAR, "layers_to_transform": [0], "layers_pattern": ["layers"]},
    ),
    "excluded": ("llama", {"target_modules": LINEAR, "exclude_modules": ["layers.0.mlp.down_proj"]}),
    "regular expression": ("llama", {"target_modules": r".*\.0\..*(q|k)_proj"}),
    "gaussian": ("llama", {"target_modules": QUERY, "init_lora_weights": "gaussian"}),
    "bias of lora_B": ("biased", {"target_modules": QUERY, "lora_bias": True}),
    "every bias": ("biased", {"target_modules": QUERY, "bias": "all"}),
    "every bias and a saved module": (
        "biased",
        {"target_modules": QUERY, "bias": "all", "modules_to_save": ["o_proj"]},
    ),
    "biases of lora layers": ("biased", {"target_modules": QUERY, "bias": "lora_only"}),
    "both biases": ("biased", {"target_modules": QUERY, "bias": "lora_only", "lora_bias": True}),
    "dora and biases": ("biased", {"target_modules": QUERY, "bias": "all", "use_dora": True}),
    "embedding": ("llama", {"target_modules": EMBEDDING + QUERY}),
    "embedding with dora": ("llama", {"target_modules": EMBEDDING + QUERY, "use_dora": True}),
    "head": ("llama", {"target_modules": HEAD}),
    "tied embedding": ("tied", {"target_modules": EMBEDDING}),
    "tied embedding with dora": ("tied", {"target_modules": EMBEDDING, "use_dora": True}),
    "tied head": ("tied", {"target_modules": HEAD}),
    "tied head with dora": ("tied", {"target_modules": HEAD, "use_dora": True}),
    "tied, each its own": ("tied", {"target_modules": HEAD + EMBEDDING}),
    "tied, kept so": ("tied", {"target_modules": HEAD + EMBEDDING, "ensure_weight_tying": True}),
    "tied, made so": ("tied", {"target_modules": EMBEDDING, "ensure_weight_tying": True}),
    "tied, nothing of it touched": ("tied", {"target_modules": QUERY}),
    "saved embedding": ("llama", {"target_modules": QUERY, "modules_to_save": EMBEDDING}),
    "saved tied embedding": ("tied", {"target_modules": QUERY, "modules_to_save": EMBEDDING}),
    "saved tied head": ("tied", {"target_modules": QUERY, "modules_to_save": HEAD}),
    "saved embedding and head": ("tied", {"target_modules": QUERY, "modules_to_save": EMBEDDING + HEAD}),
    "saved and kept tied": (
        "tied",
        {"target_modules": QUERY, "modules_to_save": EMBEDDING, "ensure_weight_tying": True},
    ),
    "saved norms": ("llama", {"target_modules": QUERY, "modules_to_save": ["norm"]}),
    "saved linear layer": ("llama", {"target_modules": QUERY, "modules_to_save": ["layers.1.mlp"]}),
    "tokens": ("llama", {"target_modules": QUERY, "trainable_token_indices": [3, 5]}),
    "tied tokens": ("tied", {"target_modules": QUERY, "trainable_token_indices": [3, 5]}),
    "tokens of two": (
        "llama",
        {"target_modules": QUERY, "trainable_token_indices": {"embed_tokens": [3], "lm_head": [4]}},
    ),
    "tied tokens and head": ("tied", {"target_modules": HEAD, "trainable_token_indices": [3, 5]}),
    "a target that is saved whole": ("llama", {"target_modules": QUERY + HEAD, "modules_to_save": HEAD}),
    "a target outside the layers": ("llama", {"target_modules": QUERY + EMBEDDING, "layers_to_transform": [0]}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "conv1d without the flag": ("gpt2", {"target_modules": ["c_attn", "c_proj"]}),
    "conv1d with dora": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "use_dora": True}),
    "conv1d with biases": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "lora_bias": True}),
    "conv1d with every bias": ("gpt2", {"target_modules": ["c_fc"], "fan_in_fan_out": True, "bias": "all"}),
    "positions": ("gpt2", {"target_modules": ["wte", "wpe"]}),
    "experts": ("mixtral", {"target_modules": QUERY, "target_parameters": EXPERTS}),
    "experts with ranks": (
        "mixtral",
        {"target_parameters": ["mlp.experts.down_proj"], "rank_pattern": {"experts.down_proj": 2}},
    ),
    "experts and router": ("mixtral", {"target_parameters": ["mlp.experts.down_proj", "mlp.gate.weight"]}),
    "experts with rslora": ("mixtral", {"target_parameters": EXPERTS, "use_rslora": True}),
    "square experts": ("gpt_oss", {"target_parameters": EXPERTS}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_merged_model_is_what_peft_runs(kind: str, bases: Bases, bench: Bench, tmp_path: Path) -> None:
    base, fields = KINDS[kind]
    model = bases.model(base)
    before = logits(model)
    trained = train(model, **fields)
    expected = logits(trained)

    merged = bench.merge(bases.folder(base), save(trained, tmp_path / "adapter"))

    assert distance(merged.logits(type(model)), expected) < 1e-5
    assert distance(before, expected) > 1e-3


RESIZED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", {"target_modules": QUERY}),
    "linear and tied": ("tied", {"target_modules": QUERY}),
    "tied embedding": ("tied", {"target_modules": QUERY + EMBEDDING}),
    "embedding and head": ("llama", {"target_modules": QUERY + EMBEDDING + HEAD}),
    "saved": ("llama", {"target_modules": QUERY, "modules_to_save": EMBEDDING + HEAD}),
    "saved and tied": ("tied", {"target_modules": QUERY, "modules_to_save": EMBEDDING + HEAD}),
    "saved embedding": ("llama", {"target_modules": QUERY, "modules_to_save": EMBEDDING}),
    "tokens": ("llama", {"target_modules": QUERY, "trainable_token_indices": [3, 60]}),
    "tied tokens": ("tied", {"target_modules": QUERY, "trainable_token_indices": [3, 60]}),
    "tokens and saved head": (
        "llama",
        {"target_modules": QUERY, "trainable_token_indices": [3, 60], "modules_to_save": HEAD},
    ),
}


@pytest.mark.parametrize("kind", RESIZED)
@pytest.mark.parametrize("tokens", [TOKENS + 6, TOKENS - 3])
def test_a_resized_vocabulary_is_the_merged_models(kind: str, tokens: int, bases, bench, tmp_path: Path) -> None:
    base, fields = RESIZED[kind]
    model = bases.model(base)
    model.resize_token_embeddings(tokens)
    trained = train(model, **fields)
    ids = torch.tensor([[0, 3, tokens - 1, 60]])

    merged = bench.merge(bases.folder(base), save(trained, tmp_path / "adapter", save_embedding_layers=True))

    assert distance(merged.logits(type(model), ids), logits(trained, ids)) < 1e-5
    assert merged.config["vocab_size"] == tokens
    assert f"the vocabulary has {tokens} tokens instead of {TOKENS}" in merged.record.warnings
