"""A verdict follows from the counts, the bounds and the intervals, and from nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from modelpress.errors import FailedPrecondition, InvalidPolicy, VerificationFailed
from modelpress.evaluations import Evaluation
from modelpress.gate_judges import JUDGES
from modelpress.gates import check_measurable, decide
from modelpress.intervals import accuracy_drop
from modelpress.metrics import Footprint, Interval, Metric, PairedCounts, ParityReport
from modelpress.policies import Gates, Policy
from modelpress.recipes import Export, Recipe
from modelpress.reports import (
    ClassQuality,
    DriftReport,
    EvaluationReport,
    Histogram,
    LatencyRow,
    Measured,
    Outcome,
    QualityReport,
    Verdict,
)
from tests.evidence.merge_samples import MERGED

RECIPE = Recipe(stages=(Export(),))


def _metric(name: str, value: float | None, n: int, unit: str = "fraction") -> Metric:
    return Metric(name=name, value=value, unit=unit, n=n)


def _quality(right: int, n: int) -> QualityReport:
    wrong = n - right
    return QualityReport(
        runtime="onnxruntime",
        dataset="sha256:" + "0" * 64,
        accuracy=_metric("accuracy", right / n if n else None, n),
        f1_macro=_metric("f1_macro", None, n),
        per_class=(ClassQuality(label="a", precision=None, recall=None, f1=None, support=n),),
        labels=("a", "b"),
        confusion=((right, wrong), (0, 0)),
        truncated=0,
    )


def _evaluation(paired: tuple[int, int, int, int] = (1990, 10, 9, 92), **changes) -> EvaluationReport:
    both, baseline, candidate, neither = paired
    counts = PairedCounts(
        both_right=both, only_baseline_right=baseline, only_candidate_right=candidate, both_wrong=neither
    )
    speedup = Interval(low=3.1, high=3.3, confidence=0.96, method="binomial order statistics")
    row = LatencyRow(
        batch_size=1,
        sequence_length=64,
        repeats=40,
        threads=1,
        baseline_median_ms=32,
        baseline_p95_ms=33,
        candidate_median_ms=10,
        candidate_p95_ms=11,
        speedup=3.2,
        speedup_interval=speedup,
    )
    report = EvaluationReport(
        baseline=_quality(both + baseline, counts.n),
        candidate=_quality(both + candidate, counts.n),
        paired=counts,
        accuracy_drop=accuracy_drop(counts, confidence=0.95),
        footprint=Footprint(
            baseline_bytes=1000, candidate_bytes=270, baseline_parameters=100, candidate_parameters=100
        ),
        latency=(row,),
        parity=ParityReport(max_logit_difference=1e-5, mean_logit_difference=1e-6, label_changes=0, n=64),
    )
    return report.model_copy(update=changes)


def _drift(flips: int = 14, n: int = 2101, **changes) -> DriftReport:
    report = DriftReport(
        probes="sha256:" + "0" * 64,
        n=n,
        flips=flips,
        flip_share=_metric("flip_share", flips / n if n else None, n),
        kl_mean=_metric("kl_mean", 0.002, n, "nats"),
        kl_p99=_metric("kl_p99", 0.04, n, "nats"),
        kl_histogram=Histogram(edges=(-8, 1), counts=(n,)),
    )
    return report.model_copy(update=changes)


def _measured(evaluation: EvaluationReport | None = None, drift: DriftReport | None = None) -> Measured:
    return Measured(MERGED.merge, evaluation or _evaluation(), drift or _drift())


def _policy(**gates: object) -> Policy:
    return Policy(gates=Gates.model_validate(gates))


def _only(policy: Policy, evaluation: EvaluationReport | None = None, drift: DriftReport | None = None):
    decision = decide(policy, _measured(evaluation, drift))
    (result,) = decision.gates
    return decision.verdict, result


OF_LANGUAGE_MODELS = ("perplexity", "top1_agreement")
ALL_GATES = {
    "accuracy_drop": {"max": 0.01},
    "flips": {"max_share": 0.03},
    "kl_mean": {"max": 0.05},
    "kl_p99": {"max": 0.5},
    "size": {"max_ratio": 0.30},
    "speed": {"min_ratio": 3.0},
    "parity": {"max_logit_difference": 0.001},
    "merge_difference": {"max": 0.005},
    "merge_logits": {"max": 0.02},
    "merge_change": {"max": 0.5},
}
MISSED = {
    "accuracy_drop": {"max": 0.0},
    "flips": {"max_share": 0.001},
    "kl_mean": {"max": 0.001},
    "kl_p99": {"max": 0.01},
    "size": {"max_ratio": 0.2},
    "speed": {"min_ratio": 3.5},
    "parity": {"max_logit_difference": 1e-6},
    "merge_difference": {"max": 0.001},
    "merge_logits": {"max": 0.001},
    "merge_change": {"max": 0.05},
}


def test_every_gate_of_a_policy_has_a_judge():
    assert list(JUDGES) == list(Gates.model_fields)
    assert [name for name in JUDGES if name not in OF_LANGUAGE_MODELS] == list(ALL_GATES)


def test_all_gates_passed_is_approved_and_only_those_of_language_models_are_left_out():
    decision = decide(_policy(**ALL_GATES), _measured())
    assert decision.verdict is Verdict.APPROVED
    assert [gate.name for gate in decision.gates] == list(ALL_GATES)
    assert decision.not_applied == OF_LANGUAGE_MODELS


@pytest.mark.parametrize("name", [name for name in MISSED if name != "accuracy_drop"])
def test_one_missed_bound_rejects_whatever_the_others_say(name):
    decision = decide(_policy(**{**ALL_GATES, name: MISSED[name]}), _measured())
    assert decision.verdict is Verdict.REJECTED
    assert {gate.name for gate in decision.gates if gate.outcome is Outcome.FAILED} == {name}


def test_gates_that_the_policy_leaves_out_are_named():
    decision = decide(_policy(size={"max_ratio": 0.3}), _measured())
    assert decision.not_applied == tuple(name for name in JUDGES if name != "size")


@pytest.mark.parametrize(
    ("paired", "outcome"),
    [
        ((1990, 10, 9, 92), Outcome.PASSED),  # drop 0.05 points
        ((1990, 25, 9, 77), Outcome.INCONCLUSIVE),  # drop 0.76 points
        ((1900, 80, 20, 101), Outcome.FAILED),  # drop 2.86 points
    ],
)
def test_the_accuracy_drop_is_judged_on_its_whole_interval(paired, outcome):
    _, result = _only(_policy(accuracy_drop={"max": 0.01}), _evaluation(paired))
    assert result.outcome is outcome
    assert (result.interval.high <= 0.01) == (outcome is Outcome.PASSED)
    assert (result.interval.low > 0.01) == (outcome is Outcome.FAILED)


def test_an_inconclusive_gate_says_how_many_examples_would_tell():
    verdict, result = _only(_policy(accuracy_drop={"max": 0.01}), _evaluation((1990, 25, 9, 77)))
    assert verdict is Verdict.INCONCLUSIVE
    factor = result.examples_needed / 2101
    enough = _evaluation(tuple(round(count * factor * 1.1) for count in (1990, 25, 9, 77)))
    assert _only(_policy(accuracy_drop={"max": 0.01}), enough)[1].outcome is Outcome.PASSED
    assert f"{result.examples_needed:,}" in result.sentence


def test_a_figure_on_its_bound_is_never_told_by_more_examples():
    _, result = _only(_policy(flips={"max_share": 0.01}), drift=_drift(flips=10, n=1000))
    assert (result.outcome, result.examples_needed) == (Outcome.INCONCLUSIVE, None)


def test_the_policys_confidence_decides_not_the_reports():
    evaluation = _evaluation((1990, 25, 11, 75))
    assert _only(_policy(accuracy_drop={"max": 0.012, "confidence": 0.9}), evaluation)[1].outcome is Outcome.PASSED
    strict = _only(_policy(accuracy_drop={"max": 0.012, "confidence": 0.999}), evaluation)[1]
    assert (strict.outcome, strict.interval.confidence) == (Outcome.INCONCLUSIVE, 0.999)


def test_a_speed_up_whose_interval_holds_the_bound_is_inconclusive():
    verdict, result = _only(_policy(speed={"min_ratio": 3.2}))
    assert (verdict, result.outcome, result.figure) == (Verdict.INCONCLUSIVE, Outcome.INCONCLUSIVE, 3.2)


def test_a_speed_up_without_a_trusted_interval_is_inconclusive():
    row = _evaluation().latency[0]
    loose = row.model_copy(update={"speedup_interval": row.speedup_interval.model_copy(update={"confidence": 0.75})})
    _, result = _only(_policy(speed={"min_ratio": 1.0}), _evaluation(latency=(loose,)))
    assert result.outcome is Outcome.INCONCLUSIVE


def test_a_shape_that_was_not_measured_names_the_measured_ones():
    with pytest.raises(FailedPrecondition, match=r"shape 8 x 16 was not measured.*1 x 64"):
        decide(_policy(speed={"min_ratio": 2, "batch_size": 8, "sequence_length": 16}), _measured())


@pytest.mark.parametrize("figure", [None, float("nan"), float("inf")])
def test_a_missing_or_infinite_figure_never_passes(figure):
    metric = Metric.model_construct(name="kl_mean", value=figure, unit="nats", n=0, interval=None)
    verdict, result = _only(_policy(kl_mean={"max": 1.0}), drift=_drift(kl_mean=metric))
    assert (verdict, result.outcome, result.figure) == (Verdict.INCONCLUSIVE, Outcome.INCONCLUSIVE, None)


@pytest.mark.parametrize("gate", [{"accuracy_drop": {"max": 1}}, {"flips": {"max_share": 1}}])
def test_no_examples_never_pass(gate):
    verdict, result = _only(_policy(**gate), _evaluation((0, 0, 0, 0)), _drift(0, 0))
    assert (verdict, result.figure) == (Verdict.INCONCLUSIVE, None)


def test_a_size_without_bytes_never_passes():
    empty = Footprint(baseline_bytes=10, candidate_bytes=0, baseline_parameters=1, candidate_parameters=1)
    assert _only(_policy(size={"max_ratio": 1}), _evaluation(footprint=empty))[0] is Verdict.INCONCLUSIVE


def test_the_same_measurements_give_the_same_decision_after_a_round_trip():
    evaluation, drift, policy = _evaluation(), _drift(), _policy(**ALL_GATES)
    stored = EvaluationReport.model_validate_json(evaluation.model_dump_json())
    again = decide(policy, _measured(stored, DriftReport.model_validate_json(drift.model_dump_json())))
    assert again == decide(policy, _measured(evaluation, drift))


def test_a_sentence_says_figure_interval_bound_and_outcome():
    _, result = _only(_policy(flips={"max_share": 0.03}))
    assert result.sentence == (
        "Share of changed predictions is 0.666 % (95 % interval 0.397 to 1.12, 2,101 examples), "
        "at most 3 % allowed: passed."
    )


def test_a_sentence_never_rounds_a_missed_bound_into_a_met_one():
    size = Footprint(
        baseline_bytes=10_000_000, candidate_bytes=3_000_001, baseline_parameters=1, candidate_parameters=1
    )
    _, result = _only(_policy(size={"max_ratio": 0.3}), _evaluation(footprint=size))
    assert result.outcome is Outcome.FAILED
    assert "30.00001 %" in result.sentence


@pytest.mark.parametrize(
    "changes",
    [
        {"accuracy_drop": _metric("accuracy_drop", 0.0, 2101)},
        {"candidate": _quality(2000, 2101)},
        {"baseline": _quality(2000, 2100)},
        {"paired": PairedCounts(both_right=2002, only_baseline_right=-2, only_candidate_right=-3, both_wrong=104)},
    ],
)
def test_figures_that_their_counts_contradict_are_refused(changes):
    with pytest.raises(VerificationFailed, match="contradict"):
        decide(_policy(size={"max_ratio": 0.3}), _measured(_evaluation().model_copy(update=changes)))


def test_a_flip_share_that_its_counts_contradict_is_refused():
    with pytest.raises(VerificationFailed, match="flip_share"):
        decide(_policy(size={"max_ratio": 0.3}), _measured(drift=_drift(flip_share=_metric("flip_share", 0.0, 2101))))


def test_a_speed_gate_outside_the_measured_shapes_is_refused_up_front():
    policy = _policy(speed={"min_ratio": 3, "batch_size": 2})
    with pytest.raises(InvalidPolicy, match=r"shape 2 x 64 will not be measured; choose one of 1 x 16, 1 x 64, 8 x 16"):
        check_measurable(policy, Evaluation(), RECIPE)


def test_a_speed_gate_with_too_few_repeats_is_refused_up_front():
    with pytest.raises(InvalidPolicy, match="at least 6"):
        check_measurable(_policy(speed={"min_ratio": 3}), _repeats(5), RECIPE)
    check_measurable(_policy(speed={"min_ratio": 3}), _repeats(6), RECIPE)


def _repeats(count: int) -> Evaluation:
    return Evaluation.model_validate({"latency": {"repeats": count}})


def test_the_gate_imports_neither_numpy_nor_torch():
    program = "import sys, modelpress.gates; sys.exit(bool({'numpy', 'torch', 'onnxruntime'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
