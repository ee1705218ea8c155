"""The gates of language models judge windows of tokens, and nothing that was not measured passes."""

from __future__ import annotations

import pytest

from modelpress.errors import InvalidPolicy
from modelpress.evaluations import Evaluation, LanguageEvaluation
from modelpress.gate_judges import JUDGES
from modelpress.gate_results import Question
from modelpress.gates import check_measurable, decide
from modelpress.intervals import share_interval
from modelpress.language_intervals import paired_ratio_interval
from modelpress.language_judges import judge_perplexity
from modelpress.metrics import Metric, ParityReport
from modelpress.policies import Gates, Perplexity, Policy
from modelpress.recipes import Recipe, read_recipe
from modelpress.reports import GateResult, Measured, Outcome
from tests.evidence.language_samples import APPROVED, FEW_WINDOWS, WITHOUT_QUESTIONS, LanguageCase

QUANTIZE = "{method: quantize_weights}"
BOUNDS = {"max": 1, "max_share": 1, "max_ratio": 9, "max_logit_difference": 9, "min_share": 0}


def _policy(**gates: object) -> Policy:
    return Policy(gates=Gates.model_validate(gates))


def _judged(measured: Measured, name: str, **gate: float) -> GateResult:
    (result,) = decide(_policy(**{name: gate}), measured).gates
    return result


def _recipe(*stages: str, export: str) -> Recipe:
    listed = "".join(f"  - {stage}\n" for stage in stages)
    return read_recipe(f"stages:\n{listed}  - {{method: export, format: {export}}}\n")


@pytest.mark.parametrize("name", ["perplexity", "top1_agreement", "flips"])
def test_a_gate_passes_where_its_interval_ends_on_the_bound_and_the_interval_is_over_windows(name):
    field = JUDGES[name].bound
    seen = _judged(APPROVED.measured, name, **{field: BOUNDS[field]})
    allowed, beyond = (seen.interval.low, seen.interval.high)[:: 1 if name == "top1_agreement" else -1]
    assert _judged(APPROVED.measured, name, **{field: allowed}).outcome is Outcome.PASSED
    assert _judged(APPROVED.measured, name, **{field: seen.figure}).outcome is Outcome.INCONCLUSIVE
    further = beyond + (1e-9 if name == "top1_agreement" else -1e-9)
    assert _judged(APPROVED.measured, name, **{field: further}).outcome is Outcome.FAILED


def test_the_perplexity_is_judged_on_the_interval_of_its_windows_at_the_policys_confidence():
    result = _judged(APPROVED.measured, "perplexity", max_ratio=1.2, confidence=0.99)
    assert result.interval == paired_ratio_interval(APPROVED.measured.language.windows, confidence=0.99)
    assert (result.figure, result.unit) == (APPROVED.measured.language.perplexity_ratio.value, "ratio")


def test_a_sentence_counts_tokens_and_windows():
    assert _judged(APPROVED.measured, "perplexity", max_ratio=1.2).sentence == (
        "Perplexity over the baseline's is 1.127 (95 % interval 1.117 to 1.136, 8,176 tokens in 16 windows), "
        "at most 1.2 allowed: passed."
    )
    assert "8,176 tokens in 16 windows), at least 70 % required" in (
        _judged(APPROVED.measured, "top1_agreement", min_share=0.7).sentence
    )


def test_tokens_of_one_window_tell_less_than_as_many_independent_examples():
    drift = APPROVED.measured.drift
    judged = _judged(APPROVED.measured, "flips", max_share=0.5).interval
    independent = share_interval(drift.flips, drift.n, confidence=0.95)
    assert judged.low < independent.low < independent.high < judged.high


@pytest.mark.parametrize(("name", "bound"), [("perplexity", 1.21), ("top1_agreement", 0.74), ("flips", 0.26)])
def test_an_inconclusive_gate_says_how_many_tokens_would_tell(name, bound):
    result = _judged(FEW_WINDOWS.measured, name, **{JUDGES[name].bound: bound})
    assert result.outcome is Outcome.INCONCLUSIVE
    assert f"so 1,533 tokens in 3 windows cannot tell; about {result.examples_needed:,} would" in result.sentence
    windows = -(-result.examples_needed // 511)
    more = LanguageCase(loss=FEW_WINDOWS.loss, windows=2 * windows)
    assert _judged(more.measured, name, **{JUDGES[name].bound: bound}).outcome is Outcome.PASSED


@pytest.mark.parametrize("name", ["perplexity", "top1_agreement", "flips"])
def test_one_window_never_passes(name):
    field = JUDGES[name].bound
    result = _judged(LanguageCase(windows=1).measured, name, **{field: BOUNDS[field]})
    assert (result.outcome, result.interval) == (Outcome.INCONCLUSIVE, None)
    assert result.sentence.endswith("cannot be judged: 1 window of tokens gives no interval: at least 2 are needed.")


def test_a_perplexity_that_no_float_holds_never_passes():
    measured = APPROVED.measured
    missing = Metric(name="perplexity", value=None, unit="ratio", n=8176)
    windows = [window.model_copy(update={"candidate_nats": 800.0 * 511}) for window in measured.language.windows]
    figures = {"windows": tuple(windows), "perplexity_ratio": missing, "candidate_perplexity": missing}
    language = measured.language.model_copy(update=figures)
    result = _judged(Measured(language=language, drift=measured.drift), "perplexity", max_ratio=1e9)
    assert (result.outcome, result.figure) == (Outcome.INCONCLUSIVE, None)
    assert "nothing that it could be computed from" in result.sentence


def test_an_interval_that_no_float_holds_is_inconclusive_and_its_figure_is_told():
    first, second, *_ = APPROVED.measured.language.windows
    apart = [window.model_copy(update={"candidate_nats": x * 511}) for window, x in ((first, 1.0), (second, 900.0))]
    ratio = Metric(name="perplexity_ratio", value=1e190, unit="ratio", n=1022)
    language = APPROVED.measured.language.model_copy(update={"windows": tuple(apart), "perplexity_ratio": ratio})
    question = Question("perplexity", 1.2, "ratio")
    result = judge_perplexity(question, Perplexity(max_ratio=1.2), language)
    assert (result.outcome, result.figure) == (Outcome.INCONCLUSIVE, 1e190)
    assert "its interval is too wide for a number" in result.sentence


def test_accuracy_and_size_are_judged_as_those_of_classifiers_are():
    accuracy = _judged(APPROVED.measured, "accuracy_drop", max=0.05)
    assert (accuracy.outcome, accuracy.figure) == (Outcome.PASSED, pytest.approx(0.002))
    assert _judged(APPROVED.measured, "size", max_ratio=0.4).outcome is Outcome.FAILED
    parity = ParityReport(max_logit_difference=0.01, mean_logit_difference=0.001, label_changes=0, n=64)
    assert _judged(LanguageCase(parity=parity).measured, "parity", max_logit_difference=0.01).outcome is Outcome.PASSED


@pytest.mark.parametrize(
    ("case", "name", "why"),
    [
        (WITHOUT_QUESTIONS, "accuracy_drop", "the evaluation dataset has no questions"),
        (APPROVED, "parity", "only an ONNX export is compared with torch"),
        (APPROVED, "merge_change", "the recipe merges nothing"),
    ],
)
def test_a_gate_without_its_measurement_is_inconclusive_and_says_why(case, name, why):
    field = JUDGES[name].bound
    result = _judged(case.measured, name, **{field: BOUNDS[field]})
    assert (result.outcome, result.figure) == (Outcome.INCONCLUSIVE, None)
    assert why in result.sentence


@pytest.mark.parametrize(
    ("evaluation", "recipe", "gate", "words"),
    [
        (
            LanguageEvaluation(),
            _recipe(QUANTIZE, export="compressed-tensors"),
            {"speed": {"min_ratio": 2}},
            "gates.speed cannot be judged: latency is measured of classifiers only; gates that can be used here: "
            "accuracy_drop, flips, kl_mean, kl_p99, size, perplexity, top1_agreement",
        ),
        (
            LanguageEvaluation(),
            _recipe(QUANTIZE, export="compressed-tensors"),
            {"parity": {"max_logit_difference": 1}},
            "only an ONNX export is compared with torch",
        ),
        (
            LanguageEvaluation(),
            _recipe(QUANTIZE, export="onnx"),
            {"merge_change": {"max": 1}},
            "the recipe merges nothing; gates that can be used here: accuracy_drop, flips, kl_mean, kl_p99, size, "
            "parity, perplexity, top1_agreement",
        ),
        (
            Evaluation(),
            _recipe(export="onnx"),
            {"perplexity": {"max_ratio": 2}},
            "tokens are compared of language models only, by an evaluation with task: text-generation; gates that can "
            "be used here: accuracy_drop, flips, kl_mean, kl_p99, size, speed, parity",
        ),
        (Evaluation(), _recipe(export="onnx"), {"top1_agreement": {"min_share": 0.5}}, "language models only"),
    ],
)
def test_a_gate_that_will_get_no_figure_is_refused_up_front(evaluation, recipe, gate, words):
    with pytest.raises(InvalidPolicy) as raised:
        check_measurable(_policy(**gate), evaluation, recipe)
    assert words in raised.value.message
    assert raised.value.field == f"policy.gates.{next(iter(gate))}"


def test_a_language_recipe_that_merges_has_the_merge_gates_too():
    recipe = _recipe("{method: merge_lora}", QUANTIZE, export="onnx")
    names = [name for name in JUDGES if name != "speed"]
    everything = _policy(**{name: {JUDGES[name].bound: BOUNDS[JUDGES[name].bound]} for name in names})
    check_measurable(everything, LanguageEvaluation(), recipe)
