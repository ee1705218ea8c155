"""A misfit between adapter and base is found from names and shapes; what they cannot tell is left to the merge."""

from __future__ import annotations

from typing import Any

import pytest

from compressors.model_layouts import CONV1D_MODULES
from modelpress.errors import InvalidModel
from modelpress.merge_recipes import MergeLora
from service.adapter_fit import check_adapters

QUERY = "model.layers.0.self_attn.q_proj"
TABLES = {"model.embed_tokens.weight": [12, 8], "lm_head.weight": [12, 8]}
SHAPES = {
    **TABLES,
    "model.layers.0.self_attn.q_proj.weight": [8, 6],
    "model.layers.1.self_attn.q_proj.weight": [8, 6],
    "model.layers.0.mixer.conv1d.weight": [8, 1, 4],
    "model.layers.0.mixer.conv2d.weight": [8, 6, 3, 3],
    "model.layers.0.mlp.experts.gate_up_proj": [3, 10, 8],
    "model.norm.weight": [8],
}


def base(shapes: dict[str, list[int]] | None = None, **changes: Any) -> dict[str, Any]:
    facts = {"tensors": shapes or SHAPES, "model_type": "llama", "tie_word_embeddings": False, "layers": 2}
    return facts | {"quantization": None} | changes


def adapter(tensors: dict[str, list[int]], **config: Any) -> dict[str, Any]:
    """Facts; names without PEFT's prefix."""
    named = {f"base_model.model.{name}": shape for name, shape in tensors.items()}
    return {"peft_type": "LORA", "config": {"target_modules": "a pattern", **config}, "tensors": named}


def pair(module: str, a: list[int], b: list[int]) -> dict[str, list[int]]:
    return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}


def table_pair(module: str, a: list[int], b: list[int]) -> dict[str, list[int]]:
    return {f"{module}.lora_embedding_A": a, f"{module}.lora_embedding_B": b}


BOTH_QUERIES = {**pair(QUERY, [2, 6], [8, 2]), **pair(QUERY.replace("0", "1"), [2, 6], [8, 2])}


def check(tensors: dict[str, list[int]], facts: dict[str, Any] | None = None, merge: MergeLora | None = None) -> None:
    check_adapters({"a": adapter(tensors)}, facts or base(), merge or MergeLora())


def refuse(adapters: dict[str, dict[str, Any]], facts: dict[str, Any], merge: MergeLora | None = None) -> str:
    with pytest.raises(InvalidModel) as caught:
        check_adapters(adapters, facts, merge or MergeLora())
    assert caught.value.reason == "ADAPTER_MISFIT"
    return caught.value.message


@pytest.mark.parametrize(
    "tensors",
    [
        BOTH_QUERIES,
        pair("lm_head", [2, 8], [12, 2]),
        table_pair("model.embed_tokens", [2, 12], [8, 2]),
        pair("model.layers.0.mixer.conv2d", [2, 6, 3, 3], [8, 2, 1, 1]),
        pair("model.layers.0.mixer.conv1d", [8, 8, 4], [8, 1, 1]),
        {"model.norm.weight": [8]},
        {**pair("lm_head", [2, 8], [12, 2]), "lm_head.base_layer.weight": [12, 8]},
        {"model.embed_tokens.weight": [15, 8], "lm_head.modules_to_save.default.weight": [15, 8]},
        {
            **table_pair("model.embed_tokens", [2, 15], [8, 2]),
            "model.embed_tokens.base_layer.weight": [15, 8],
            "lm_head.weight": [15, 8],
        },
    ],
)
def test_what_fits_passes(tensors: dict[str, list[int]]) -> None:
    check(tensors)


@pytest.mark.parametrize(
    ("tensors", "mentions"),
    [
        (pair("model.layers.2.self_attn.q_proj", [2, 6], [8, 2]), ["model.layers.2.self_attn.q_proj", "does not have"]),
        (pair("transformer.h.0.attn.c_attn", [2, 6], [8, 2]), ["transformer.h.0.attn.c_attn.weight"]),
        (pair(QUERY, [2, 7], [8, 2]), [f"{QUERY}.weight", "[8, 7]", "[8, 6]"]),
        (pair(QUERY, [2, 8], [6, 2]), [f"{QUERY}.weight", "[6, 8]", "[8, 6]"]),
        (table_pair("model.embed_tokens", [2, 15], [8, 2]), ["model.embed_tokens.weight", "[15, 8]", "[12, 8]"]),
        (pair("model.layers.0.mixer.conv2d", [2, 5, 3, 3], [8, 2, 1, 1]), ["[8, 5, 3, 3]", "[8, 6, 3, 3]"]),
        (pair("model.layers.0.mixer.conv2d", [2, 6, 3], [8, 2, 1]), ["conv2d", "[8, 6, 3]", "[8, 6, 3, 3]"]),
        (pair("model.layers.0.mixer.conv1d", [2, 8, 4], [8, 2, 1]), ["conv1d", "[8, 8, 4]", "[8, 1, 4]", "grouped"]),
        ({"model.norm.weight": [9]}, ["model.norm.weight", "[9]", "[8]"]),
        ({"model.extra.weight": [9]}, ["it replaces 'model.extra.weight' of shape [9]"]),
        ({"score.weight": [3, 8]}, ["score.weight", "[3, 8]", "labels"]),
        ({"classifier.out_proj.weight": [3, 8]}, ["classifier.out_proj.weight", "labels"]),
        ({"model.embed_tokens.weight": [10, 8]}, ["[10, 8]", "[12, 8]"]),
        ({"model.embed_tokens.weight": [15, 8]}, ["[15, 8]", "lm_head.weight", "[12, 8]"]),
        ({"model.embed_tokens.weight": [15, 8], "lm_head.weight": [16, 8]}, ["[15, 8]", "[16, 8]"]),
        ({"model.embed_tokens.weight": [15, 9], "lm_head.weight": [15, 9]}, ["[15, 9]", "[12, 8]"]),
    ],
)
def test_a_misfit_names_the_tensor_and_both_shapes(tensors: dict[str, list[int]], mentions: list[str]) -> None:
    message = refuse({"a": adapter(tensors)}, base())
    assert message.startswith("inputs.adapters[0]: the adapter does not fit the base: ")
    assert all(part in message for part in mentions), message


@pytest.mark.parametrize("model_type", sorted(CONV1D_MODULES))
def test_a_conv1d_s_weight_is_stored_the_other_way_round(model_type: str) -> None:
    stored = base({"h.0.attn.c_attn.weight": [8, 6], "h.0.attn.q_proj.weight": [8, 6]}, model_type=model_type)
    check(pair("transformer.h.0.attn.c_attn", [2, 8], [6, 2]), stored)
    check(pair("transformer.h.0.attn.q_proj", [2, 6], [8, 2]), stored)
    assert "[6, 8]" in refuse({"a": adapter(pair("transformer.h.0.attn.c_attn", [2, 6], [8, 2]))}, stored)


@pytest.mark.parametrize("model_type", ["llama", None])
def test_every_other_linear_layer_is_stored_as_it_is(model_type: str | None) -> None:
    stored = base({"h.0.attn.c_attn.weight": [8, 6]}, model_type=model_type)
    assert "[6, 8]" in refuse({"a": adapter(pair("h.0.attn.c_attn", [2, 8], [6, 2]))}, stored)


@pytest.mark.parametrize(
    ("stored", "named"),
    [
        ("h.0.attn.c_attn.weight", "transformer.h.0.attn.c_attn"),
        ("transformer.h.0.attn.c_attn.weight", "h.0.attn.c_attn"),
        ("language_model.model.layers.0.mlp.fc.weight", "model.language_model.layers.0.mlp.fc"),
        ("wte.weight", "transformer.wte"),
        ("bert.pooler.dense.weight", "pooler.dense"),
    ],
)
def test_names_may_lack_a_prefix_or_have_another(stored: str, named: str) -> None:
    check(pair(named, [2, 6], [8, 2]), base({stored: [8, 6]}))
    assert "[8, 7]" in refuse({"a": adapter(pair(named, [2, 7], [8, 2]))}, base({stored: [8, 6]}))


@pytest.mark.parametrize(
    ("tensors", "changes"),
    [
        (pair("lm_head", [2, 8], [12, 2]), {"tie_word_embeddings": True}),
        (pair("lm_head", [2, 8], [12, 2]), {"tie_word_embeddings": None}),
        ({"lm_head.weight": [12, 8]}, {"tie_word_embeddings": True}),
        ({"model.embed_tokens.weight": [15, 8]}, {"tie_word_embeddings": True}),
    ],
)
def test_a_tied_head_that_is_not_stored_is_left_to_the_merge(
    tensors: dict[str, list[int]], changes: dict[str, Any]
) -> None:
    shapes = {name: shape for name, shape in SHAPES.items() if name != "lm_head.weight"}
    check(tensors, base(shapes, **changes))


@pytest.mark.parametrize(
    "facts",
    [
        adapter(pair("model.layers.0.mlp.experts", [6, 8], [10, 6]), target_parameters=["mlp.experts.gate_up_proj"]),
        adapter({"anything.at.all": [1]}) | {"peft_type": "IA3"},
    ],
)
def test_experts_and_other_kinds_are_left_to_the_merge(facts: dict[str, Any]) -> None:
    check_adapters({"a": facts}, base(), MergeLora())


def test_packed_weights_are_left_to_the_merge() -> None:
    packed = {f"{QUERY}.weight": [24, 1], f"{QUERY}.weight.absmax": [1]}
    check(pair(QUERY, [2, 6], [8, 2]), base(packed, quantization="bitsandbytes"))


def test_a_head_that_the_base_lacks_is_taken_where_the_recipe_names_its_classes() -> None:
    check({"score.weight": [3, 8]}, merge=MergeLora(labels=("a", "b", "c")))
    check(
        {"classifier.weight": [3, 8]}, base({**SHAPES, "classifier.weight": [2, 8]}), MergeLora(labels=("a", "b", "c"))
    )


@pytest.mark.parametrize(
    ("tensors", "targets", "mentions"),
    [
        (pair(QUERY, [2, 6], [8, 2]), ["q_proj"], "no tensors for 'model.layers.1.self_attn.q_proj'"),
        (BOTH_QUERIES, ["q_proj", "up_proj"], "'up_proj', and the base has no such layer"),
        (BOTH_QUERIES, ["q_proj", "lm_head"], "no tensors for 'lm_head'"),
    ],
)
def test_a_list_of_targets_leaves_no_layer_out_and_matches_something(
    tensors: dict[str, list[int]], targets: list[str], mentions: str
) -> None:
    assert mentions in refuse({"a": adapter(tensors, target_modules=targets)}, base())


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj"], "layers_to_transform": [0]},
        {"target_modules": ["q_proj"], "exclude_modules": ["model.layers.1.self_attn.q_proj"]},
        {"target_modules": r".*layers\.0.*"},
    ],
)
def test_targets_that_more_decides_are_left_to_the_merge(config: dict[str, Any]) -> None:
    check_adapters({"a": adapter(pair(QUERY, [2, 6], [8, 2]), **config)}, base(), MergeLora())


@pytest.mark.parametrize(
    "stored",
    [
        "model.layers.2.self_attn.q_proj.weight",
        "mtp.layers.0.self_attn.q_proj.weight",
        "model.mtp_block.0.self_attn.q_proj.weight",
        "model.layers.0.experts.1.q_proj.weight",
    ],
)
def test_layers_that_transformers_does_not_load_and_fused_experts_need_no_tensors(stored: str) -> None:
    facts = base({**SHAPES, stored: [8, 6]})
    check_adapters({"a": adapter(BOTH_QUERIES, target_modules=["q_proj"])}, facts, MergeLora())


def test_a_table_that_is_not_loaded_keeps_its_rows_where_the_vocabulary_grows() -> None:
    facts = base({**SHAPES, "model.layers.2.embed_tokens.weight": [12, 8]})
    check({"model.embed_tokens.weight": [15, 8], "lm_head.weight": [15, 8]}, facts)


def test_a_module_is_found_under_the_name_that_its_files_have() -> None:
    facts = base({"model.layers.0.block_sparse_moe.gate.weight": [4, 8]}, model_type="mixtral")
    check({"model.layers.0.mlp.gate.weight": [4, 8]}, facts)
    assert "[5, 8]" in refuse({"a": adapter({"model.layers.0.mlp.gate.weight": [5, 8]})}, facts)


def test_two_adapters_that_replace_the_same_tensor_are_refused() -> None:
    both = {name: adapter({"model.norm.weight": [8]}) for name in "ab"}
    message = refuse(both, base())
    assert "'a' and 'b' both replace 'model.norm.weight'" in message


def test_the_base_s_own_table_that_peft_saves_beside_its_factors_replaces_nothing() -> None:
    tensors = {**pair("lm_head", [2, 8], [12, 2]), "lm_head.base_layer.weight": [12, 8]}
    check_adapters({name: adapter(tensors) for name in "ab"}, base(), MergeLora())


def test_linear_needs_equal_ranks_and_other_combinations_do_not() -> None:
    both = {"a": adapter(pair(QUERY, [2, 6], [8, 2])), "b": adapter(pair(QUERY, [3, 6], [8, 3]))}
    check_adapters(both, base(), MergeLora())
    message = refuse(both, base(), MergeLora(combination_type="linear"))
    assert f"'a' and 'b' have lora_A.weight [2, 6] and [3, 6] on '{QUERY}'" in message
