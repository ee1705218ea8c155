"""Do the models of a request fit its recipe and each other? Judged from their facts, each misfit one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NoReturn

from modelpress.errors import InvalidModel, InvalidRecipe
from modelpress.merge_recipes import MergeLora
from modelpress.recipes import Recipe
from service.base_tensors import OUTPUT_TABLES, leaf_of
from service.fit import Facts

DEQUANTIZED = ("nf4", "fp4", "int8")
"""bitsandbytes' formats (NF4: Dettmers et al. 2023, "QLoRA"; int8: Dettmers et al. 2022, "LLM.int8()"), whose weights
can be read back as numbers."""


def check_obstacle(recipe: Recipe, base: Facts) -> None:
    """A recipe that only merges takes any model; every other one a model of a known family, complete."""
    if recipe.quantize_weights and base["quantization"]:
        _refuse_quantized(
            "inputs.base",
            base,
            "it would be rounded twice; name the full-precision model that it was made from, or merge bitsandbytes' "
            "weights with dequantize_base: true first and quantize the result",
        )
    obstacle = base["obstacle"]
    if obstacle and not recipe.is_merge_only:
        raise InvalidModel(
            f"inputs.base: {obstacle['message']} (a recipe that merges and exports 'safetensors' takes it)",
            reason=obstacle["reason"],
            field="inputs.base",
        )


def check_quantization(recipe: Recipe, base: Facts, models: Mapping[str, Facts]) -> None:
    """Merging is done in full precision: into quantized weights only where the recipe asks to dequantize them."""
    dequantizes = isinstance(recipe.merge, MergeLora) and recipe.merge.dequantize_base
    if dequantizes:
        _check_dequantizable(base)
    elif recipe.merge and base["quantization"]:
        cure = "name the full-precision model that it was made from"
        if isinstance(recipe.merge, MergeLora) and base["quantization_type"] in DEQUANTIZED:
            cure += ", or set dequantize_base: true in recipe.stages[0]"
        _refuse_quantized("inputs.base", base, cure)
    for index, model in enumerate(models.values()):
        if model["quantization"]:
            _refuse_quantized(f"inputs.models[{index}]", model, "name the full-precision model")


def _check_dequantizable(base: Facts) -> None:
    if not base["quantization"]:
        field = "recipe.stages[0].dequantize_base"
        raise InvalidRecipe(
            f"{field} is true, and the base is not quantized: leave it out", field=field, reason="NOT_QUANTIZED"
        )
    if base["quantization_type"] not in DEQUANTIZED:
        cure = f"dequantize_base reads bitsandbytes' {', '.join(DEQUANTIZED)} only: name the full-precision model"
        _refuse_quantized("inputs.base", base, cure)


def _refuse_quantized(field: str, model: Facts, cure: str) -> NoReturn:
    method = " ".join(filter(None, (model["quantization"], model["quantization_type"])))
    raise InvalidModel(
        f"{field} is quantized (quantization_config: {method}): {cure}", reason="QUANTIZED_BASE", field=field
    )


def check_models(models: Mapping[str, Facts], base: Facts) -> Iterator[str]:
    """Every model has the base's tensors in the base's shapes, and its labels; yields a warning on tokenizers."""
    for index, (name, model) in enumerate(models.items()):
        field = f"inputs.models[{index}]"
        _check_names(name, model["tensors"], base["tensors"], field)
        for tensor, shape in base["tensors"].items():
            if model["tensors"][tensor] != shape:
                found = f"tensor {tensor!r} has shape {model['tensors'][tensor]} in model {name!r}"
                _misfit(f"{found} and {shape} in the base: merge models of one size and vocabulary", field)
        if model["labels"] != base["labels"] and model["labels"] and base["labels"]:
            labels = f"model {name!r} has the labels {model['labels']}, the base {base['labels']}"
            _misfit(f"{labels}: merge classifiers whose labels have the same order"[:600], field)
        if model["vocabulary_files"] != base["vocabulary_files"]:
            yield (
                f"{field}: model {name!r} has other tokenizer files than the base, whose are kept: where the same id "
                "is another token, the merged embeddings mean neither"
            )


def _check_names(name: str, model: Mapping[str, list[int]], base: Mapping[str, list[int]], field: str) -> None:
    for missing, there, lacks, has in (
        (base.keys() - model.keys(), base, f"model {name!r}", "the base"),
        (model.keys() - base.keys(), model, "the base", f"model {name!r}"),
    ):
        if missing:
            tensor = min(missing)
            cure = "merge checkpoints of one architecture"
            if leaf_of(tensor) in OUTPUT_TABLES:
                cure = f"in {lacks} it is tied to the embeddings: save that model with tie_word_embeddings false first"
            _misfit(f"{lacks} has no tensor {tensor!r}, of shape {there[tensor]} in {has}: {cure}", field)


def _misfit(what: str, field: str) -> NoReturn:
    raise InvalidModel(f"{field}: the models do not fit together: {what}", reason="MODEL_MISFIT", field=field)
