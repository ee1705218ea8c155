"""What cannot be of a language model's request is refused before it is queued, each misfit in one sentence."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from modelpress.digests import Digest, digest_bytes
from modelpress.errors import InvalidDataset, InvalidModel, InvalidRecipe, InvalidRequest
from modelpress.manifests import ArtifactKind
from modelpress.recipes import read_recipe
from service.model_fit import check_obstacle
from service.preflight import preflight
from service.requests import ConversionRequest
from tests.service.intake.test_decoders import config, decoder_files
from tests.service.intake.test_preflight import Server
from tests.service.intake.tiny import Files, Inspect, jsonl

BASE, TRAIN, TEST, PROBES = (digest_bytes(name.encode()) for name in ("base", "train", "test", "probes"))
STAGE = "{method: quantize_weights, group_size: 32, calibration_samples: 4, sequence_length: 16%s}"
RECIPE = f"stages: [{STAGE}, {{method: export, format: compressed-tensors}}]"
WINDOW = "{task: text-generation, window: 16, max_new_tokens: 4}"
POLICY = "gates: {kl_mean: {max: 1}}"
QUESTION = {"prompt": "2 + 2 =", "choices": [" 4", " 5"], "answer": 0}
Facts = dict[Digest, dict[str, Any]]


def request(*, stage: str = "", evaluation: str = WINDOW, **fields: Any) -> ConversionRequest:
    recipe = RECIPE.replace("%s", stage and f", {stage}")
    given = {"base": BASE, "train": TRAIN, "evaluation_dataset": TEST, "policy_yaml": POLICY, "recipe_yaml": recipe}
    return ConversionRequest(**given | fields, evaluation_yaml=evaluation)


def dataset(inspect: Inspect, *rows: Any) -> dict[str, Any]:
    return inspect(ArtifactKind.DATASET, {"d.jsonl": jsonl(*rows)})


@pytest.fixture
def facts(inspect: Inspect) -> Facts:
    base = decoder_files(config(hidden_size=32, intermediate_size=64))
    return {
        BASE: inspect(ArtifactKind.MODEL, base),
        TRAIN: dataset(inspect, *({"text": f"{number} " * 20} for number in range(4))),
        TEST: dataset(inspect, {"text": "a b"}, QUESTION, {"prompt": "once"}),
    }


def test_a_request_that_can_be_is_estimated_without_a_warning(facts: Facts) -> None:
    estimate = preflight(request(), facts, Server())
    assert estimate.warnings == ()
    assert estimate.steps[0] == "compress/1-quantize_weights"
    assert 0 < estimate.candidate_bytes < facts[BASE]["weight_bytes"]


@pytest.mark.parametrize(
    ("fields", "field", "sentence"),
    [
        ({"evaluation": "{task: text-generation, window: 64}"}, "evaluation.window", "at most 32 tokens: set it to 32"),
        (
            {"evaluation": "{task: text-generation, window: 16, max_new_tokens: 33}"},
            "evaluation.max_new_tokens",
            "max_new_tokens is 33",
        ),
        ({"stage": "sequence_length: 64"}, "recipe.stages[0].sequence_length", "sequence_length is 64"),
    ],
)
def test_lengths_are_within_the_models_positions(
    facts: Facts, fields: dict[str, Any], field: str, sentence: str
) -> None:
    if "stage" in fields:
        recipe = RECIPE.replace("sequence_length: 16%s", fields["stage"])
        asked = request(recipe_yaml=recipe)
    else:
        asked = request(**fields)
    with pytest.raises(InvalidRequest, match=sentence) as caught:
        preflight(asked, facts, Server())
    assert (caught.value.reason, caught.value.field) == ("TOO_LONG", field)


@pytest.mark.parametrize(
    ("stage", "field", "mentions"),
    [
        ("targets: [model.layers.0.mlp.up]", "recipe.stages[0].targets[0]", "model.layers.0.mlp.up_proj"),
        ("targets: ['re:.*experts.*']", "recipe.stages[0].targets[0]", "matches no module"),
        ("ignore: [lm_hed]", "recipe.stages[0].ignore[0]", "lm_head"),
        ("targets: [lm_head], ignore: []", "recipe.stages[0].targets", "'lm_head' is no linear layer"),
    ],
)
def test_targets_and_ignore_match_something(facts: Facts, stage: str, field: str, mentions: str) -> None:
    with pytest.raises(InvalidRecipe) as caught:
        preflight(request(stage=stage), facts, Server())
    assert caught.value.field == field
    assert caught.value.message.startswith("recipe.stages[0].")
    assert mentions in caught.value.message


def test_groups_divide_the_inputs_of_as_many_targets_as_the_recipe_asks_for(inspect: Inspect, facts: Facts) -> None:
    facts[BASE] = inspect(ArtifactKind.MODEL, decoder_files(config(hidden_size=32, intermediate_size=48)))
    reason = r"2 of 14 targets .* model\.layers\.0\.mlp\.down_proj: its 48 inputs are not divided by group_size 32"
    with pytest.raises(InvalidRecipe, match=reason) as caught:
        preflight(request(), facts, Server())
    assert caught.value.field == "recipe.stages[0].max_fallback_share"
    assert preflight(request(stage="max_fallback_share: 0.2"), facts, Server()).steps


def test_some_target_must_be_divided_whatever_share_may_fall_back(inspect: Inspect, facts: Facts) -> None:
    facts[BASE] = inspect(ArtifactKind.MODEL, decoder_files(config(hidden_size=48, intermediate_size=48)))
    with pytest.raises(InvalidRecipe, match=r"32 divides the inputs of no target, e\.g\. the 48 of") as caught:
        preflight(request(stage="max_fallback_share: 1"), facts, Server())
    assert caught.value.field == "recipe.stages[0].group_size"


def test_the_evaluations_task_is_the_bases(inspect: Inspect, facts: Facts, base_files: Files) -> None:
    exported = "stages: [{method: export}]"
    with pytest.raises(
        InvalidRequest, match="LlamaForCausalLM for 'text-generation': write `task: text-generation`"
    ) as caught:
        preflight(request(recipe_yaml=exported, evaluation="", train=None), facts, Server())
    assert (caught.value.reason, caught.value.field) == ("TASK_MISFIT", "evaluation.task")
    facts[BASE] = inspect(ArtifactKind.MODEL, base_files)
    with pytest.raises(InvalidRequest, match="BertForSequenceClassification for 'text-classification'"):
        preflight(request(), facts, Server())


def test_a_base_that_is_quantized_already_is_refused_with_the_cure() -> None:
    base = {"quantization": "bitsandbytes", "quantization_type": "nf4", "obstacle": {"message": "m", "reason": "r"}}
    with pytest.raises(InvalidModel, match="rounded twice; name the full-precision model") as caught:
        check_obstacle(read_recipe(RECIPE.replace("%s", "")), base)
    assert (caught.value.reason, caught.value.field) == ("QUANTIZED_BASE", "inputs.base")


@pytest.mark.parametrize(
    ("row", "mentions"),
    [
        ({"text": "t", "prompt": "p"}, "line 2: columns 'text' and 'prompt' in one row"),
        ({"label": "x"}, "line 2: no column 'text' or 'prompt'; columns here: label"),
        ({"prompt": "p", "choices": ["a", "b"]}, "line 2: no column 'answer', which a row with 'choices' needs"),
        ({"choices": ["a", "b"], "answer": 0}, "line 2: no column 'prompt', which a row with 'answer' needs"),
        ({"text": 3}, "line 2: column 'text' holds int, expected text"),
        ({"prompt": None}, "line 2: column 'prompt' holds null, expected text"),
        (QUESTION | {"choices": "ab"}, "line 2: column 'choices' holds str, expected a list of two or more texts"),
        (QUESTION | {"choices": ["a"]}, "line 2: column 'choices' holds a list of 1"),
        (QUESTION | {"choices": ["a", "a"]}, "line 2: column 'choices' holds a list with one text twice, expected"),
        (QUESTION | {"choices": ["a", ""]}, "line 2: column 'choices' holds a list with an empty text, expected"),
        (QUESTION | {"choices": ["a", 2]}, "line 2: column 'choices' holds a list with int, expected a list of two"),
        (QUESTION | {"answer": "0"}, "line 2: column 'answer' holds str, expected the number of the right choice"),
        (QUESTION | {"answer": -1}, "line 2: column 'answer' holds -1"),
        (QUESTION | {"answer": 2}, "line 2: column 'answer' holds 2: the 2 choices are counted from 0"),
    ],
)
@pytest.mark.parametrize("role", ["evaluation_dataset", "probes"])
def test_a_row_that_is_no_text_question_or_prompt_is_refused_with_its_line(
    inspect: Inspect, facts: Facts, role: str, row: Any, mentions: str
) -> None:
    odd = digest_bytes(b"odd")
    facts[odd] = dataset(inspect, {"text": "a"}, row)
    with pytest.raises(InvalidDataset) as caught:
        preflight(request(**{role: odd}), facts, Server())
    assert mentions in caught.value.message
    assert caught.value.field == ("inputs.probes" if role == "probes" else "inputs.evaluation")


def test_columns_are_named_by_the_evaluation(inspect: Inspect, facts: Facts) -> None:
    facts[TEST] = dataset(inspect, {"body": "a", "text": 3})
    facts[TRAIN] = dataset(inspect, {"body": "1 " * 200})
    named = WINDOW.replace("window", "text_column: body, window")
    assert preflight(request(evaluation=named), facts, Server()).steps
    with pytest.raises(InvalidDataset, match=r"inputs\.evaluation: d\.jsonl, line 1: column 'text' holds int"):
        preflight(request(), facts | {TRAIN: dataset(inspect, {"text": "1 " * 200})}, Server())


def test_a_dataset_without_texts_is_refused(inspect: Inspect, facts: Facts) -> None:
    facts[TEST] = dataset(inspect, QUESTION)
    with pytest.raises(InvalidDataset, match=r"inputs\.evaluation: no column 'text'; columns here: prompt, choices"):
        preflight(request(), facts, Server())


@pytest.mark.parametrize(
    ("rows", "mentions"),
    [
        ([{"body": "t"}], "inputs.train: no column 'text'; columns here: body"),
        ([{"text": "t"}, {"body": "t"}], "inputs.train: d.jsonl, line 2: no column 'text', which other rows have"),
        ([{"text": "t"}, {"text": None}], "inputs.train: d.jsonl, line 2: column 'text' holds null"),
    ],
)
def test_every_row_that_calibration_reads_is_a_text(
    inspect: Inspect, facts: Facts, rows: list[Any], mentions: str
) -> None:
    facts[TRAIN] = dataset(inspect, *rows)
    with pytest.raises(InvalidDataset) as caught:
        preflight(request(), facts, Server())
    assert mentions in caught.value.message


def test_what_is_odd_and_possible_is_a_warning(inspect: Inspect, facts: Facts) -> None:
    facts[TRAIN] = dataset(inspect, {"text": "a b"}, {"text": "c"})
    overlap, few = preflight(request(), facts, Server()).warnings
    assert overlap.startswith("100.0% of the different evaluation texts stand in the training data too")
    assert few == (
        "recipe.stages[0] asks for 64 calibration tokens (calibration_samples x sequence_length), and the training "
        "texts have 4 bytes, which cannot be as many"
    )
    [few_to_measure_on] = preflight(request(stage="algorithm: rtn"), facts, Server()).warnings
    assert few_to_measure_on == few


def test_weights_that_no_scale_can_have_the_dtype_of_are_refused(facts: Facts) -> None:
    facts[BASE] = {**facts[BASE], "dtypes": {"F64": 12}}
    with pytest.raises(InvalidModel, match=r"inputs\.base has weights in F64, .* save the model in one of them"):
        preflight(request(), facts, Server())


def test_weights_of_several_dtypes_need_a_dtype_for_their_scales(facts: Facts) -> None:
    odd = "model.layers.0.mlp.up_proj.weight"
    facts[BASE] = {**facts[BASE], "other_dtypes": {odd: "BF16"}}
    with pytest.raises(InvalidModel, match=rf"{re.escape(odd)}' has dtype BF16, .*q_proj.weight' has F32") as caught:
        preflight(request(), facts, Server())
    assert caught.value.field == odd
    for stage in ("scale_dtype: float32", "ignore: ['model.layers.0.mlp.up_proj']"):
        assert preflight(request(stage=stage), facts, Server()).warnings == ()


def test_norms_may_have_another_dtype(facts: Facts) -> None:
    facts[BASE] = {**facts[BASE], "other_dtypes": {"model.norm.weight": "BF16"}}
    assert preflight(request(), facts, Server()).warnings == ()


@pytest.mark.parametrize(
    ("rope", "kind"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
    ],
)
def test_positions_that_no_graph_can_compute_are_refused_for_onnx_alone(
    facts: Facts, inspect: Inspect, rope: dict[str, Any], kind: str
) -> None:
    base = decoder_files(config(hidden_size=32, intermediate_size=64, **rope))
    facts[BASE] = inspect(ArtifactKind.MODEL, base)
    preflight(request(), facts, Server())
    onnx = RECIPE.replace("%s", "").replace("compressed-tensors", "onnx")
    with pytest.raises(InvalidRequest, match=f"rope_type '{kind}' of inputs.base .* export another format") as caught:
        preflight(request(recipe_yaml=onnx), facts, Server())
    assert (caught.value.reason, caught.value.field) == ("POSITIONS_MISFIT", "recipe.export.format")


def test_texts_that_are_all_empty_are_refused(facts: Facts, inspect: Inspect) -> None:
    empty = dataset(inspect, {"text": ""}, {"text": ""}, QUESTION)
    with pytest.raises(InvalidDataset, match=r"inputs\.evaluation: every text in column 'text' is empty"):
        preflight(request(), {**facts, TEST: empty}, Server())
    empty = dataset(inspect, {"text": ""}, {"text": ""})
    with pytest.raises(InvalidDataset, match=r"inputs\.train: every text in column 'text' is empty"):
        preflight(request(), {**facts, TRAIN: empty}, Server())


def test_the_first_misfit_is_the_tasks_not_the_gates(facts: Facts) -> None:
    with pytest.raises(InvalidRequest, match=r"evaluation\.task") as caught:
        replace(request(), evaluation_yaml="{max_length: 16}", policy_yaml="gates: {perplexity: {max_ratio: 2}}")
    assert caught.value.reason == "TASK_MISFIT"
