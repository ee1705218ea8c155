"""The gate: a policy and the stored measurements in, one verdict out.

    decision = decide(policy, evaluation, drift)
    decision.verdict            # APPROVED, REJECTED or INCONCLUSIVE
    decision.gates[0].sentence  # for people

The service decides with this function and offline verification decides again with it: pure, deterministic, without
numpy, from raw counts wherever the report holds them.

What is judged how:
- accuracy drop and flips are shares of a sample: on their interval at the policy's confidence, computed here;
- speed varies from run to run: on the order-statistic interval of the median speed-up;
- size and parity are facts of the files and of the fixed parity inputs: the figure against the bound;
- the KL gates speak about the probes themselves, not about a population: the figure against the bound.

A figure that is missing or not a number never passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from modelpress.errors import FailedPrecondition, InvalidPolicy
from modelpress.evaluations import Evaluation
from modelpress.gate_results import Question, Sample, judge_figure, judge_sample, unjudged
from modelpress.intervals import (
    accuracy_drop,
    examples_needed,
    median_ranks,
    paired_difference_interval,
    share_interval,
)
from modelpress.measurement_checks import check_consistent
from modelpress.policies import AccuracyDrop, Flips, Gates, KlMean, KlP99, Parity, Policy, Size, Speed
from modelpress.reports import (
    DriftReport,
    EvaluationReport,
    GateDecision,
    GateResult,
    Interval,
    LatencyRow,
    Outcome,
    Verdict,
)

SPEED_CONFIDENCE = 0.95
"""Confidence of the median speed-up's interval: the latency run measures at it, the speed gate demands it."""


@dataclass(frozen=True)
class Measured:
    """Everything that a gate may look at."""

    evaluation: EvaluationReport
    drift: DriftReport


def decide(policy: Policy, evaluation: EvaluationReport, drift: DriftReport) -> GateDecision:
    """Apply every gate of the policy. One FAILED rejects; else one INCONCLUSIVE leaves it open; else approved.

    Raises VerificationFailed where the report's own figures contradict each other, FailedPrecondition where the speed
    gate names a shape that was not measured.
    """
    check_consistent(evaluation, drift)
    gates = {name: getattr(policy.gates, name) for name in Gates.model_fields}
    measured = Measured(evaluation, drift)
    results = tuple(JUDGES[name](gate, measured) for name, gate in gates.items() if gate is not None)
    left_out = tuple(name for name, gate in gates.items() if gate is None)
    return GateDecision(verdict=_verdict(results), gates=results, not_applied=left_out)


def check_measurable(policy: Policy, evaluation: Evaluation) -> None:
    """Raise InvalidPolicy where a gate asks for what `evaluation` will not measure: found before anything runs."""
    speed, latency = policy.gates.speed, evaluation.latency
    if speed is None:
        return
    if speed.batch_size not in latency.batch_sizes or speed.sequence_length not in latency.sequence_lengths:
        measured = ", ".join(_shape(b, t) for b in latency.batch_sizes for t in latency.sequence_lengths)
        raise InvalidPolicy(
            f"gates.speed: shape {_shape(speed.batch_size, speed.sequence_length)} will not be measured; choose one of "
            f"{measured} (batch size x tokens), or add it to the evaluation's `latency`",
            field="policy.gates.speed",
        )
    if median_ranks(latency.repeats, confidence=SPEED_CONFIDENCE)[1] < SPEED_CONFIDENCE:
        raise InvalidPolicy(
            f"gates.speed: {latency.repeats} repeats give no {SPEED_CONFIDENCE:.0%} interval of the median; set the "
            "evaluation's `latency.repeats` to at least 6",
            field="policy.gates.speed",
        )


def _verdict(results: tuple[GateResult, ...]) -> Verdict:
    outcomes = {result.outcome for result in results}
    if Outcome.FAILED in outcomes:
        return Verdict.REJECTED
    return Verdict.APPROVED if outcomes == {Outcome.PASSED} else Verdict.INCONCLUSIVE


def _accuracy_drop(gate: AccuracyDrop, measured: Measured) -> GateResult:
    paired = measured.evaluation.paired

    def interval_at(n: int) -> Interval:
        lost, gained = (count * n / paired.n for count in (paired.only_baseline_right, paired.only_candidate_right))
        return paired_difference_interval(lost, gained, n, confidence=gate.confidence)

    drop = accuracy_drop(paired, confidence=gate.confidence)
    sample = None
    if drop.value is not None and drop.interval is not None:
        sample = Sample(drop.value, drop.interval, paired.n, lambda: _needed(interval_at, gate.max, paired.n))
    return judge_sample(Question("accuracy_drop", gate.max, "fraction"), sample)


def _flips(gate: Flips, measured: Measured) -> GateResult:
    flips, n = measured.drift.flips, measured.drift.n

    def interval_at(examples: int) -> Interval:
        return share_interval(flips * examples / n, examples, confidence=gate.confidence)

    sample = Sample(flips / n, interval_at(n), n, lambda: _needed(interval_at, gate.max_share, n)) if n else None
    return judge_sample(Question("flips", gate.max_share, "fraction"), sample)


def _needed(interval_at: Callable[[int], Interval], bound: float, seen: int) -> int | None:
    return examples_needed(interval_at, bound=bound, seen=seen)


def _speed(gate: Speed, measured: Measured) -> GateResult:
    row = _latency_row(gate, measured.evaluation.latency)
    question = Question("speed", gate.min_ratio, "ratio", ">=")
    if row.speedup_interval.confidence < SPEED_CONFIDENCE:
        why = f"{row.repeats} repeats give no {SPEED_CONFIDENCE:.0%} interval of the median; at least 6 are needed"
        return unjudged(question, row.speedup, why)
    return judge_sample(question, Sample(row.speedup, row.speedup_interval, row.repeats, lambda: None))


def _latency_row(gate: Speed, rows: tuple[LatencyRow, ...]) -> LatencyRow:
    for row in rows:
        if (row.batch_size, row.sequence_length) == (gate.batch_size, gate.sequence_length):
            return row
    measured = ", ".join(_shape(row.batch_size, row.sequence_length) for row in rows) or "none"
    raise FailedPrecondition(
        f"gates.speed: shape {_shape(gate.batch_size, gate.sequence_length)} was not measured; measured shapes (batch "
        f"size x tokens): {measured}",
        field="policy.gates.speed",
    )


def _shape(batch_size: int, sequence_length: int) -> str:
    return f"{batch_size} x {sequence_length}"


def _size(gate: Size, measured: Measured) -> GateResult:
    footprint = measured.evaluation.footprint
    figure = footprint.ratio if footprint.baseline_bytes > 0 and footprint.candidate_bytes > 0 else None
    return judge_figure(Question("size", gate.max_ratio, "ratio"), figure)


def _kl_mean(gate: KlMean, measured: Measured) -> GateResult:
    return judge_figure(Question("kl_mean", gate.max, "nats"), measured.drift.kl_mean.value)


def _kl_p99(gate: KlP99, measured: Measured) -> GateResult:
    return judge_figure(Question("kl_p99", gate.max, "nats"), measured.drift.kl_p99.value)


def _parity(gate: Parity, measured: Measured) -> GateResult:
    parity = measured.evaluation.parity
    figure = parity.max_logit_difference if parity.n > 0 else None
    return judge_figure(Question("parity", gate.max_logit_difference, "logits"), figure)


JUDGES: Mapping[str, Callable[[Any, Measured], GateResult]] = {
    "accuracy_drop": _accuracy_drop,
    "flips": _flips,
    "kl_mean": _kl_mean,
    "kl_p99": _kl_p99,
    "size": _size,
    "speed": _speed,
    "parity": _parity,
}
