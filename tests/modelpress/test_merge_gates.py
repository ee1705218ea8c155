"""The merge gates judge the figures of the merge against their bounds, and nothing that was not measured passes."""

from __future__ import annotations

import pytest

from modelpress.errors import InvalidPolicy, VerificationFailed
from modelpress.evaluations import Evaluation
from modelpress.gate_judges import JUDGES
from modelpress.gates import check_measurable, decide
from modelpress.merge_recipes import LAYERS_ALONE, NO_REFERENCE
from modelpress.merge_reports import LogitComparison, MergeReport
from modelpress.policies import Gates, Policy
from modelpress.recipes import Recipe, read_recipe
from modelpress.reports import GateResult, Measured, Outcome, Verdict
from tests.evidence.merge_samples import CHECKPOINTS, MERGED, WITHOUT_LOGITS

LORA = "{method: merge_lora}"
TIES = "{method: merge_lora, combination_type: ties, density: 0.5}"
DEQUANTIZE = "{method: merge_lora, dequantize_base: true}"
MODELS = "{method: merge_models}"
BOUNDS = {"max": 1, "max_share": 1, "max_ratio": 9, "min_ratio": 0.1, "max_logit_difference": 9, "min_share": 0}


def _merge(**changes) -> MergeReport:
    return MERGED.merge.model_copy(update=changes)


def _logits(difference: float, largest: float) -> LogitComparison:
    return LogitComparison(max_difference=difference, max_logit=largest, label_changes=3, n=256)


def _policy(**gates: object) -> Policy:
    return Policy(gates=Gates.model_validate(gates))


def _judged(name: str, bound: float, merge: MergeReport) -> GateResult:
    (result,) = decide(_policy(**{name: {"max": bound}}), Measured(merge=merge)).gates
    return result


def _recipe(*stages: str, export: str = "safetensors") -> Recipe:
    listed = "".join(f"  - {stage}\n" for stage in stages)
    return read_recipe(f"stages:\n{listed}  - {{method: export, format: {export}}}\n")


@pytest.mark.parametrize(
    ("name", "figure", "merge"),
    [
        ("merge_difference", 0.25, _merge(layer_difference=0.25)),
        ("merge_logits", 0.25, _merge(logits=_logits(0.5, 2.0))),
        ("merge_change", 0.25, _merge(largest_change=0.25)),
    ],
)
def test_a_figure_on_its_bound_passes_and_the_next_number_above_fails(name, figure, merge):
    on, below = _judged(name, figure, merge), _judged(name, 0.24999999999999997, merge)
    assert (on.outcome, on.figure, on.bound, on.unit, on.interval) == (Outcome.PASSED, figure, figure, "fraction", None)
    assert (below.outcome, below.figure) == (Outcome.FAILED, figure)


def test_a_merge_only_report_is_approved_by_its_three_gates_alone():
    policy = _policy(merge_difference={"max": 0.005}, merge_logits={"max": 0.02}, merge_change={"max": 0.5})
    decision = decide(policy, Measured(merge=MERGED.merge))
    assert decision.verdict is Verdict.APPROVED
    assert decision.not_applied == tuple(name for name, row in JUDGES.items() if row.part != "merge")


def test_a_sentence_names_the_layer_and_counts_what_was_not_compared():
    assert _judged("merge_difference", 0.005, MERGED.merge).sentence == (
        "Largest output difference of a merged layer is 0.00169 of the output's norm "
        "(model.layers.3.mlp.down_proj, largest of 154; not compared: 1), "
        "at most 0.005 of the output's norm allowed: passed."
    )
    assert "not compared" not in _judged("merge_difference", 0.005, _merge(not_compared={})).sentence


def _left_out(count: int, *, over_memory_limit: int = 0) -> dict[str, object]:
    return {
        "not_compared": {f"layer {i}": "a reason" for i in range(count)},
        "over_memory_limit": over_memory_limit,
    }


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"layers": 199, **_left_out(1, over_memory_limit=1)},
            "the memory limit left out 1 of 200 changed layers and tensors; a higher limits.memory_limit_bytes "
            "compares all",
        ),
        (
            {"layers": 99, **_left_out(101)},
            "101 of 200 changed layers and tensors, more than half, could not be compared",
        ),
    ],
)
def test_few_layers_do_not_speak_for_many(changes, why):
    merge = _merge(layer_difference=0.25, **changes)
    passing, failing = _judged("merge_difference", 0.25, merge), _judged("merge_difference", 0.2, merge)
    assert (passing.outcome, passing.figure) == (Outcome.INCONCLUSIVE, 0.25)
    assert passing.sentence.endswith(f" cannot be judged: {why}.")
    assert failing.outcome is Outcome.FAILED


def test_half_of_the_layers_speak_for_all_where_the_rest_has_no_reference():
    merge = _merge(layer_difference=0.25, layers=100, **_left_out(100))
    assert _judged("merge_difference", 0.25, merge).outcome is Outcome.PASSED


def test_a_sentence_says_how_many_positions_answer_otherwise():
    assert _judged("merge_logits", 0.02, MERGED.merge).sentence == (
        "Largest logit difference of the merged model is 0.0064 of the largest logit "
        "(3 of 256 positions have another largest logit), at most 0.02 of the largest logit allowed: passed."
    )


@pytest.mark.parametrize(
    ("name", "merge", "why"),
    [
        ("merge_difference", CHECKPOINTS.merge, NO_REFERENCE),
        ("merge_logits", CHECKPOINTS.merge, NO_REFERENCE),
        ("merge_logits", WITHOUT_LOGITS.merge, WITHOUT_LOGITS.logits_missing),
        (
            "merge_difference",
            _merge(layers=0, layer_difference=None, layer=""),
            "no layer was compared: the base has no such tensor",
        ),
        ("merge_logits", _merge(logits=_logits(0.0, 0.0)), "there is nothing that it could be computed from"),
    ],
)
def test_a_figure_that_is_not_there_never_passes_and_the_sentence_says_why(name, merge, why):
    result = _judged(name, 1e9, merge)
    assert (result.outcome, result.figure) == (Outcome.INCONCLUSIVE, None)
    assert result.sentence.endswith(f" cannot be judged: {why}.")


@pytest.mark.parametrize("name", JUDGES)
def test_a_gate_without_its_part_of_the_measurements_is_inconclusive(name):
    policy = _policy(**{name: {JUDGES[name].bound: BOUNDS[JUDGES[name].bound]}})
    decision = decide(policy, Measured(merge=MERGED.merge))
    expected = Verdict.APPROVED if JUDGES[name].part == "merge" else Verdict.INCONCLUSIVE
    assert decision.verdict is expected
    assert ("only merges" in decision.gates[0].sentence) == (expected is Verdict.INCONCLUSIVE)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": -1}, "merge.layers is -1"),
        ({"over_memory_limit": -1}, "merge.over_memory_limit counts -1 of 1"),
        ({"over_memory_limit": 2}, "merge.over_memory_limit counts 2 of 1"),
        ({"byte_identical": -1}, "merge.byte_identical is -1"),
        ({"layer_difference": -0.1}, "merge.layer_difference is -0.1"),
        ({"layer_difference": float("nan")}, "merge.layer_difference is nan"),
        ({"largest_change": float("inf")}, "merge.largest_change is inf"),
        ({"layer": ""}, "names no layer"),
        ({"largest_change_tensor": ""}, "names no layer or tensor"),
        ({"layer_difference": None}, "has no figure"),
        ({"layers": 0}, "comes from 0 layers"),
        ({"changed": 0}, "comes from 0 tensors"),
        ({"reference": ""}, "a reference that it does not name"),
        ({"logits": None}, "either logits or the reason"),
        ({"logits_missing": "no memory"}, "either logits or the reason"),
        ({"logits": _logits(0.1, 1.0).model_copy(update={"n": 0})}, "compares 0 positions"),
        ({"logits": _logits(0.1, 1.0).model_copy(update={"label_changes": 257})}, "257 changes of 256"),
        ({"logits": _logits(-0.1, 1.0)}, "max_difference is -0.1"),
    ],
)
def test_a_merge_that_contradicts_itself_is_refused(changes, words):
    with pytest.raises(VerificationFailed, match="contradict") as raised:
        decide(_policy(merge_change={"max": 1}), Measured(merge=_merge(**changes)))
    assert words in raised.value.message


def test_a_report_that_measured_nothing_is_refused():
    with pytest.raises(VerificationFailed, match="nothing was measured"):
        decide(_policy(merge_change={"max": 1}), Measured())


@pytest.mark.parametrize(
    ("recipe", "gate", "words"),
    [
        (
            _recipe(LORA),
            {"accuracy_drop": {"max": 0.1}},
            "gates.accuracy_drop cannot be judged: a recipe that only merges",
        ),
        (_recipe(LORA), {"speed": {"min_ratio": 2}}, "can be used here: merge_difference, merge_logits, merge_change"),
        (_recipe(MODELS), {"merge_logits": {"max": 0.1}}, f"{NO_REFERENCE}; gates that can be used here: merge_change"),
        (_recipe(TIES), {"merge_difference": {"max": 0.1}}, "PEFT applies ties to the adapters' factors"),
        (
            _recipe(DEQUANTIZE),
            {"merge_logits": {"max": 0.1}},
            f"{LAYERS_ALONE}; gates that can be used here: merge_diff",
        ),
        (_recipe(export="onnx"), {"merge_change": {"max": 0.1}}, "the recipe merges nothing"),
        (_recipe(MODELS, export="onnx"), {"merge_difference": {"max": 0.1}}, NO_REFERENCE),
    ],
)
def test_a_gate_that_will_get_no_figure_is_refused_up_front(recipe, gate, words):
    with pytest.raises(InvalidPolicy) as raised:
        check_measurable(_policy(**gate), Evaluation(), recipe)
    assert words in raised.value.message
    assert raised.value.field == f"policy.gates.{next(iter(gate))}"


def test_every_gate_that_is_offered_is_accepted():
    names = [name for name, row in JUDGES.items() if row.part != "language"]
    everything = _policy(**{name: {JUDGES[name].bound: BOUNDS[JUDGES[name].bound]} for name in names})
    check_measurable(everything, Evaluation(), _recipe(LORA, export="onnx"))
    merging = {name: {"max": 1} for name, row in JUDGES.items() if row.part == "merge"}
    check_measurable(_policy(**merging), Evaluation(), _recipe(LORA))
    check_measurable(_policy(merge_difference={"max": 1}), Evaluation(), _recipe(DEQUANTIZE))
    check_measurable(_policy(merge_change={"max": 1}), Evaluation(), _recipe(MODELS))
