"""An adapter that does not fit is refused before anything is written: the tensor or setting, the values, a cure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modelpress.errors import InvalidModel
from tests.compressors.lora_merges import (
    PREFIX,
    QUERY,
    TOKENS,
    Bases,
    Bench,
    factors,
    quiet_peft,
    save,
    train,
    write_adapter,
)
from tests.compressors.stored_models import Tensors

LAYERS = [QUERY, QUERY.replace("layers.0", "layers.1")]
A, B = f"{PREFIX}{QUERY}.lora_A.weight", f"{PREFIX}{QUERY}.lora_B.weight"
HEAD = f"{PREFIX}lm_head.weight"


def fitting() -> Tensors:
    """An adapter of rank 4 on q_proj of both layers."""
    return factors(LAYERS[0], 32, 32) | factors(LAYERS[1], 32, 32, seed=2)


Refuse = Callable[[str, Tensors, dict[str, Any]], InvalidModel]


@pytest.fixture
def refuse(bases: Bases, bench: Bench, tmp_path: Path) -> Refuse:
    def refuse(base: str, tensors: Tensors, fields: dict[str, Any]) -> InvalidModel:
        adapter = write_adapter(tmp_path / "adapter", tensors, **{"target_modules": ["q_proj"]} | fields)
        error = bench.refused(bases.folder(base), adapter)
        assert "'one'" in error.message or error.field in error.message
        return error

    return refuse


def without(*parts: str) -> Tensors:
    return {name: tensor for name, tensor in fitting().items() if not any(part in name for part in parts)}


def test_the_adapter_that_all_these_are_made_from_fits(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", fitting(), target_modules=["q_proj"])

    assert bench.merge(bases.folder("llama"), adapter).record.touched == tuple(f"{module}.weight" for module in LAYERS)


@pytest.mark.parametrize(
    ("tensors", "mentions"),
    [
        (
            fitting() | factors(QUERY.replace("layers.0", "layers.2"), 32, 32),
            ["layers.2", "another base|was trained on"],
        ),
        (fitting() | factors("model.layers.0.mlp.q_proj", 32, 32), ["mlp.q_proj"]),
        (without("layers.1"), ["layers.1.self_attn.q_proj", "lora_A", "missing"]),
        (without(A), [A, "missing"]),
        (without(B), [B, "missing"]),
        (factors(QUERY, 64, 64) | factors(LAYERS[1], 64, 64), [A, "[4, 64]", "[4, 32]", "[32, 32]"]),
        (fitting() | {B: torch.ones(16, 4)}, [B, "[16, 4]", "[32, 4]"]),
        (fitting() | {A: torch.ones(4, 32, 1, 1)}, [A, "[4, 32, 1, 1]", "[4, 32]"]),
        (fitting() | {A: torch.ones(8, 32), B: torch.ones(32, 8)}, [A, "[8, 32]", "[4, 32]", "rank 4"]),
        (fitting() | {f"{PREFIX}{QUERY}.lora_B.bias": torch.ones(32)}, ["lora_B.bias", "lora_bias"]),
        (fitting() | {f"{PREFIX}{QUERY}.lora_magnitude_vector": torch.ones(32)}, ["lora_magnitude_vector", "use_dora"]),
        (fitting() | {f"{PREFIX}{QUERY}.lora_C.weight": torch.ones(4, 4)}, ["lora_C"]),
        (fitting() | {f"{PREFIX}{QUERY}.weight": torch.ones(32, 32)}, [f"{QUERY}.weight", "modules_to_save"]),
        (fitting() | factors("lm_head", TOKENS, 32), ["lm_head", "target_modules"]),
        (fitting() | factors("model.norm", 32, 32), ["model.norm"]),
        ({A.removeprefix(PREFIX): torch.ones(4, 32)}, [A.removeprefix(PREFIX), PREFIX]),
    ],
    ids=lambda value: None if isinstance(value, dict) else " ".join(value)[:60],
)
def test_tensors_for_another_base_are_refused(tensors: Tensors, mentions: list[str], refuse: Refuse) -> None:
    mentioned(refuse("llama", tensors, {}), mentions)


def test_an_adapter_of_another_architecture_is_refused(refuse: Refuse) -> None:
    tensors = factors("transformer.h.0.attn.c_attn", 96, 32)

    mentioned(refuse("llama", tensors, {"target_modules": ["c_attn"]}), ["c_attn", "base"])


@pytest.mark.parametrize(
    ("fields", "mentions"),
    [
        ({"target_modules": ["q_proj", "nope"]}, ["target_modules", "nope"]),
        ({"target_modules": ["q_proj", "k_proj"]}, ["k_proj", "target_modules"]),
        ({"target_modules": ["v_proj"]}, [QUERY, "target_modules"]),
        ({"target_modules": r".*\.0\..*q_proj"}, ["layers.1", "target_modules"]),
        ({"target_parameters": ["q_proj.weights"]}, ["target_parameters", "q_proj.weights"]),
        ({"rank_pattern": {"v_proj": 4}}, ["rank_pattern", "v_proj"]),
        ({"alpha_pattern": {"layers.7.*": 4}}, ["alpha_pattern", "layers.7"]),
        ({"rank_pattern": {"q_proj": 4, "self_attn.q_proj": 4}}, ["rank_pattern", "self_attn.q_proj"]),
        ({"rank_pattern": {"q_proj": 8}}, [A, "[4, 32]", "[8, 32]", "rank 8"]),
        ({"r": 5}, [A, "[4, 32]", "[5, 32]", "rank 5"]),
        ({"modules_to_save": ["score"]}, ["modules_to_save", "score"]),
        ({"modules_to_save": ["lm_head"]}, ["lm_head"]),
        ({"use_dora": True}, [QUERY, "lora_magnitude_vector", "use_dora"]),
        ({"lora_bias": True}, [f"{QUERY}.lora_B.bias", "missing"]),
        ({"layers_to_transform": [0]}, ["layers.1", "target_modules"]),
        ({"exclude_modules": ["layers.1.self_attn.q_proj"]}, ["layers.1", "target_modules"]),
    ],
    ids=str,
)
def test_settings_that_contradict_the_tensors_are_refused(fields, mentions: list[str], refuse: Refuse) -> None:
    mentioned(refuse("llama", fitting(), fields), mentions)


@pytest.mark.parametrize("shape", [(0,), (0, 32), (4, 0)])
def test_an_empty_tensor_is_refused_as_a_shard_of_zero_3(shape: tuple[int, ...], refuse: Refuse) -> None:
    error = refuse("llama", fitting() | {A: torch.ones(shape)}, {})

    mentioned(error, [A, str(list(shape)), "ZeRO-3", "gather"])
    assert error.reason == "EMPTY_TENSOR"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [A, B])
def test_a_value_that_is_no_number_is_refused(name: str, value: float, refuse: Refuse) -> None:
    damaged = fitting()
    damaged[name][1, 1] = value

    error = refuse("llama", damaged, {})

    mentioned(error, [name, "NaN|infinite", "checkpoint"])
    assert error.reason == "NON_FINITE"


def test_integers_are_refused(refuse: Refuse) -> None:
    mentioned(refuse("llama", fitting() | {A: torch.ones(4, 32, dtype=torch.int8)}, {}), [A, "int8", "floating"])


@pytest.mark.parametrize("fields", [{"lora_alpha": 1e41}, {"alpha_pattern": {"q_proj": 1e41}}])
def test_a_scaling_beyond_fp32_is_refused(fields: dict[str, Any], refuse: Refuse) -> None:
    mentioned(refuse("llama", fitting(), fields), [f"{QUERY}.weight", "NaN|infinite", "alpha"])


@pytest.mark.parametrize("weight", [1e308, -1e308, 1e41])
@pytest.mark.parametrize("combination", ["cat", "linear", "svd", "ties", "dare_linear", "dare_ties"])
def test_a_weight_beyond_fp32_is_refused_by_every_combination(
    combination: str, weight: float, bases: Bases, bench: Bench, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "adapter", fitting(), target_modules=["q_proj"])
    needed = {"svd": {"svd_rank": 2}, "cat": {}, "linear": {}}.get(combination, {"density": 0.5})

    error = bench.refused(
        bases.folder("llama"), (adapter, weight), (adapter, 0.5), combination_type=combination, **needed
    )

    mentioned(error, [f"{QUERY}.weight", "NaN|infinite", "weight"])


def test_an_untrained_adapter_is_refused(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    zero = {name: tensor * (0 if "lora_B" in name else 1) for name, tensor in fitting().items()}
    adapter = write_adapter(tmp_path / "adapter", zero, target_modules=["q_proj"])

    with pytest.raises(InvalidModel, match="lora_B are all zero"):
        bench.merge(bases.folder("llama"), adapter)


def test_a_bias_that_the_base_does_not_have_is_refused(refuse: Refuse) -> None:
    biases = {f"{PREFIX}{module}.lora_B.bias": torch.ones(32) for module in LAYERS}

    mentioned(refuse("llama", fitting() | biases, {"lora_bias": True}), [f"{QUERY}.lora_B.bias", "bias"])


@pytest.mark.parametrize(
    ("tensor", "mentions"),
    [
        (torch.ones(TOKENS + 1, 32), [HEAD.removeprefix(PREFIX), "65", "embed_tokens", "[64, 32]", "save_embedding"]),
        (torch.ones(TOKENS, 16), [HEAD, "[64, 16]", "[64, 32]"]),
        (torch.ones(TOKENS), [HEAD, "[64]", "[64, 32]"]),
    ],
    ids=["longer", "narrower", "flat"],
)
def test_a_vocabulary_that_does_not_fit_is_refused(tensor, mentions: list[str], refuse: Refuse) -> None:
    mentioned(refuse("llama", fitting() | {HEAD: tensor}, {"modules_to_save": ["lm_head"]}), mentions)


def test_a_table_that_was_resized_alone_is_refused(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    model = bases.model("llama")
    model.resize_token_embeddings(TOKENS + 6)
    trained = train(model, target_modules=["embed_tokens", "q_proj"])
    with quiet_peft():
        adapter = save(trained, tmp_path / "adapter", save_embedding_layers=False)

    error = bench.refused(bases.folder("llama"), adapter)

    mentioned(error, ["embed_tokens", "70|[4, 70]", "64|[64, 32]"])


@pytest.mark.parametrize(
    ("indices", "rows", "mentions"),
    [([1, TOKENS], 2, ["64", "token"]), ([1, 2], 3, ["[3, 32]", "[2, 32]"]), (None, 2, ["trainable_token_indices"])],
)
def test_trained_tokens_that_do_not_fit_are_refused(indices, rows: int, mentions: list[str], refuse: Refuse) -> None:
    name = f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta"

    error = refuse("llama", fitting() | {name: torch.ones(rows, 32)}, {"trainable_token_indices": indices})

    mentioned(error, [name, *mentions])


@pytest.mark.parametrize(
    ("a", "b"), [((16, 32), (32, 15)), ((12, 32), (32, 12)), ((16, 30), (32, 16))], ids=["b", "rank", "width"]
)
def test_experts_of_another_shape_are_refused(a, b, refuse: Refuse) -> None:
    key = f"{PREFIX}model.layers.0.mlp.experts.lora_{{}}.weight"
    tensors = {key.format("A"): torch.ones(a), key.format("B"): torch.ones(b)}

    error = refuse("mixtral", tensors, {"target_modules": None, "target_parameters": ["mlp.experts.down_proj"]})

    mentioned(error, [key.format("A"), str(list(a)), str(list(b)), "down_proj", "[4, 32, 48]"])


def mentioned(error: InvalidModel, mentions: list[str]) -> None:
    """Every mention, of an `a|b` either, in one sentence of some length."""
    missing = [mention for mention in mentions if not any(part in error.message for part in mention.split("|"))]
    assert not missing, f"{missing} not in: {error.message}"
    assert len(error.message) < 600
    assert "\n" not in error.message
