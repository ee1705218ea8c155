"""Models are merged in full precision, and only where each has the base's tensors, shapes and labels."""

from __future__ import annotations

from typing import Any

import pytest

from modelpress.errors import InvalidModel, InvalidRecipe
from modelpress.recipes import Recipe, read_recipe
from service.model_fit import check_models, check_quantization

SHAPES = {"model.embed_tokens.weight": [12, 8], "lm_head.weight": [12, 8]}
LORA = "stages: [{method: merge_lora%s}, {method: export, format: safetensors}]"
MODELS = "stages: [{method: merge_models}, {method: export, format: safetensors}]"


def facts(shapes: dict[str, list[int]] | None = None, **changes: Any) -> dict[str, Any]:
    found = {"tensors": shapes or SHAPES, "labels": [], "vocabulary_files": {"tokenizer.json": "sha256:1"}}
    return found | {"quantization": None, "quantization_type": None} | changes


def recipe(text: str, setting: str = "") -> Recipe:
    return read_recipe(text.replace("%s", setting))


def test_equal_tensors_fit_without_a_warning() -> None:
    assert list(check_models({"m": facts(), "n": facts()}, facts())) == []


@pytest.mark.parametrize(
    ("model", "mentions"),
    [
        (facts({**SHAPES, "lm_head.weight": [15, 8]}), ["'lm_head.weight' has shape [15, 8] in model 'm' and [12, 8]"]),
        (facts({**SHAPES, "extra.weight": [3]}), ["the base has no tensor 'extra.weight', of shape [3] in model 'm'"]),
        (facts({"lm_head.weight": [12, 8]}), ["model 'm' has no tensor 'model.embed_tokens.weight', of shape [12, 8]"]),
        (facts({"model.embed_tokens.weight": [12, 8]}), ["model 'm' has no tensor 'lm_head.weight'", "tied"]),
        (facts(labels=["b", "a"]), ["model 'm' has the labels ['b', 'a'], the base ['a', 'b']"]),
    ],
)
def test_a_misfit_names_the_tensor_both_shapes_and_the_model(model: dict[str, Any], mentions: list[str]) -> None:
    with pytest.raises(InvalidModel) as caught:
        list(check_models({"fits": facts(labels=["a", "b"]), "m": model}, facts(labels=["a", "b"])))
    assert (caught.value.reason, caught.value.field) == ("MODEL_MISFIT", "inputs.models[1]")
    assert all(part in caught.value.message for part in mentions), caught.value.message


def test_another_tokenizer_is_a_warning() -> None:
    other = facts(vocabulary_files={"tokenizer.json": "sha256:2"})
    [warning] = check_models({"m": other}, facts())
    assert warning.startswith("inputs.models[0]: model 'm' has other tokenizer files than the base")


NF4 = {"quantization": "bitsandbytes", "quantization_type": "nf4"}
GPTQ = {"quantization": "gptq", "quantization_type": None}


@pytest.mark.parametrize(
    ("base", "setting", "mentions"),
    [
        (NF4, "", ["bitsandbytes nf4", "full-precision", "dequantize_base: true"]),
        (GPTQ, "", ["gptq", "full-precision"]),
        (GPTQ, ", dequantize_base: true", ["gptq", "bitsandbytes' nf4, fp4, int8 only"]),
        ({"quantization": "bitsandbytes"}, ", dequantize_base: true", ["bitsandbytes' nf4"]),
    ],
)
def test_a_quantized_base_is_refused_with_the_cure(base: dict[str, Any], setting: str, mentions: list[str]) -> None:
    with pytest.raises(InvalidModel) as caught:
        check_quantization(recipe(LORA, setting), facts(**base), {})
    assert (caught.value.reason, caught.value.field) == ("QUANTIZED_BASE", "inputs.base")
    assert all(part in caught.value.message for part in mentions), caught.value.message


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_a_base_of_bitsandbytes_is_merged_into_where_the_recipe_says_so(kind: str) -> None:
    check_quantization(recipe(LORA, ", dequantize_base: true"), facts(**NF4 | {"quantization_type": kind}), {})


def test_the_cure_is_one_that_helps() -> None:
    with pytest.raises(InvalidModel) as caught:
        check_quantization(recipe(LORA), facts(**GPTQ), {})
    assert "dequantize_base" not in caught.value.message


def test_dequantizing_what_is_not_quantized_is_refused() -> None:
    with pytest.raises(InvalidRecipe, match="the base is not quantized: leave it out") as caught:
        check_quantization(recipe(LORA, ", dequantize_base: true"), facts(), {})
    assert caught.value.field == "recipe.stages[0].dequantize_base"


def test_quantized_models_are_not_merged() -> None:
    check_quantization(recipe(MODELS), facts(), {"m": facts()})
    with pytest.raises(InvalidModel, match="name the full-precision model") as caught:
        check_quantization(recipe(MODELS), facts(**NF4), {"m": facts()})
    assert "dequantize_base" not in caught.value.message
    with pytest.raises(InvalidModel) as caught:
        check_quantization(recipe(MODELS), facts(), {"m": facts(), "n": facts(**GPTQ)})
    assert caught.value.field == "inputs.models[1]"
