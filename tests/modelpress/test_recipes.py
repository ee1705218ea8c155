"""A recipe holds stages in an order that is possible; its canonical form holds every default."""

from __future__ import annotations

import json

import pytest

from modelpress.errors import InvalidRecipe
from modelpress.recipes import Prune, Quantize, read_recipe, read_stage

FULL = """
stages:
  - method: merge_lora
  - method: prune
    targets: [ffn]
    ratio: 0.45
  - method: recover
    steps: 200
  - method: quantize
    scheme: int8_qat
  - method: export
    format: onnx
"""


def refuse(*stages: str) -> InvalidRecipe:
    with pytest.raises(InvalidRecipe) as caught:
        read_recipe("stages: [" + ", ".join(f"{{method: {stage}}}" for stage in stages) + "]")
    return caught.value


def test_the_documented_example_is_read() -> None:
    recipe = read_recipe(FULL)
    assert [stage.method for stage in recipe.stages] == ["merge_lora", "prune", "recover", "quantize", "export"]
    assert recipe.needs_training_data == ("prune", "recover", "quantize")


@pytest.mark.parametrize("method", ["merge_lora", "merge_models"])
def test_a_recipe_that_only_merges_is_one_merge_and_the_safetensors_themselves(method: str) -> None:
    recipe = read_recipe(f"stages: [{{method: {method}}}, {{method: export, format: safetensors}}]")
    assert recipe.is_merge_only
    assert recipe.merge == recipe.stages[0]
    assert recipe.needs_training_data == ()
    assert not read_recipe(f"stages: [{{method: {method}}}, {{method: export}}]").is_merge_only
    assert read_recipe("stages: [{method: export}]").merge is None


def test_magnitude_pruning_needs_no_training_data() -> None:
    assert read_recipe("stages: [{method: prune, importance: magnitude}, {method: export}]").needs_training_data == ()


def test_the_canonical_form_writes_every_default_out_and_reads_back() -> None:
    recipe = read_recipe(FULL)
    stages = json.loads(recipe.canonical())["stages"]
    assert stages[1]["round_to"] == 8
    assert stages[3]["learning_rate"] == 2e-5
    assert read_recipe(recipe.canonical().decode()) == recipe
    assert tuple(read_stage(stage) for stage in stages) == recipe.stages


def test_the_digest_follows_the_arguments_not_the_spelling() -> None:
    assert read_recipe(FULL).digest == read_recipe(FULL.replace("ratio: 0.45", "ratio: 0.450")).digest
    assert read_recipe(FULL).digest != read_recipe(FULL.replace("0.45", "0.46")).digest


def test_an_unknown_method_names_the_closest_and_all() -> None:
    error = refuse("prun", "export")
    assert error.field == "stages[0].method"
    sentence, known = error.message.split(" known: ")
    assert sentence == "stages[0].method: unknown method 'prun'; did you mean 'prune'?"
    assert set(known.split(", ")) >= {"merge_lora", "prune", "recover", "quantize", "export"}


@pytest.mark.parametrize(
    ("stages", "mentions"),
    [
        (["prune"], "last stage must be 'export'"),
        (["export", "prune"], "last stage must be 'export'"),
        (["export", "export"], "only the last"),
        (["prune", "merge_lora", "export"], "'merge_lora' must be the first"),
        (["merge_lora", "merge_lora", "export"], "at most once"),
        (["quantize", "prune", "export"], "'quantize' must stand right before 'export'"),
        (["recover", "export"], "'recover' needs a 'prune'"),
        (["recover", "prune", "export"], "'recover' needs a 'prune'"),
        (["prune, ratio: 0", "export"], "stages[0].prune.ratio"),
        (["prune, targets: [ffn, ffn]", "export"], "'ffn' is given twice"),
        (["prune, targets: []", "export"], "needs 1 or more"),
        (["merge_lora, adapters: [a, a]", "export"], "'a' is given twice"),
        (["quantize, ignore: ['re:(']", "export"], "no regular expression"),
        (["quantize, kl_weight: 0, hidden_state_weight: 0", "export"], "nothing to train on"),
        (["quantize, steps: yes", "export"], "must be a number"),
        (["export"] * 33, "at most 32"),
        (["merge_lora", "merge_models", "export"], "exclude each other"),
        (["prune", "merge_models", "export"], "'merge_models' must be the first"),
        (["merge_lora", "prune", "export, format: safetensors"], "recipes that only merge"),
        (["export, format: safetensors"], "nothing is changed"),
        (["merge_lora, combination_type: ties", "export"], "density is needed by 'ties'"),
        (["merge_lora, density: 0.5", "export"], "density is used by ties, dare_linear, dare_ties only"),
        (["merge_models, merge_method: slerp, density: 0.5", "export"], "leave it out for 'slerp'"),
        (["merge_models, merge_method: dare_ties, density: 1.5", "export"], "density"),
        (["merge_lora, combination_type: svd", "export"], "svd_rank belongs to combination_type 'svd'"),
        (["merge_lora, svd_rank: 4", "export"], "svd_rank belongs to combination_type 'svd'"),
        (["merge_lora, combination_type: average", "export"], "'cat', 'linear', 'svd'"),
        (["merge_models, models: [a, a]", "export"], "'a' is given twice"),
        (["merge_lora, labels: [a, a]", "export"], "'a' is given twice"),
    ],
)
def test_what_cannot_be_is_refused(stages: list[str], mentions: str) -> None:
    assert mentions in refuse(*stages).message


def test_stages_have_the_documented_defaults() -> None:
    assert (Prune().ratio, Prune().importance) == (0.4, "taylor")
    assert (Quantize().steps, Quantize().scheme, Quantize().embeddings) == (100, "int8_qat", "int8")
