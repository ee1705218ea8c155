"""How each gate is judged: which part of the measurements answers its question, and with which figure.

- accuracy drop and flips are shares of a sample: on their interval at the policy's confidence, computed here;
- perplexity, top-1 agreement and the flips of tokens come from windows of tokens: on their interval over the windows;
- speed varies from run to run: on the order-statistic interval of the median speed-up;
- size and parity are facts of the files and of the fixed parity inputs: the figure against the bound;
- the KL gates speak about the probes themselves, not about a population: the figure against the bound;
- the merge gates speak about the merged files and seeded inputs: the figure against the bound.
  `merge_difference` passes only where what was compared is at least half of what changed, and nothing was left out for
  memory.

A figure that is missing or not a number never passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from modelpress.documents import Document
from modelpress.errors import FailedPrecondition
from modelpress.gate_results import Question, Sample, judge_figure, judge_sample, unjudged
from modelpress.intervals import accuracy_drop, examples_needed, paired_difference_interval, share_interval
from modelpress.language_judges import judge_perplexity, judge_token_flips, judge_top1
from modelpress.merge_recipes import NO_REFERENCE
from modelpress.merge_reports import MergeReport
from modelpress.metrics import Footprint, Interval, PairedCounts, ParityReport
from modelpress.policies import AccuracyDrop, Flips, Speed
from modelpress.reports import DriftReport, EvaluationReport, GateResult, LatencyRow, Measured, Outcome

SPEED_CONFIDENCE = 0.95
"""Confidence of the median speed-up's interval: the latency run measures at it, the speed gate demands it."""

ONLY_MERGED = "a recipe that only merges is not evaluated on data"
NOT_MEASURED: Mapping[str, str] = {
    "merge": "the recipe merges nothing",
    "evaluation": "latency is measured of classifiers only",
    "language": "tokens are compared of language models only, by an evaluation with task: text-generation",
    "paired": "the evaluation dataset has no questions, which are rows with choices and an answer",
    "parity": "of a language model only an ONNX export is compared with torch",
}
"""Why a part of the measurements is not there, where the recipe does more than merge."""


class Judge(NamedTuple):
    """One gate: who answers from which part of `Measured`, the policy's field for the bound, the unit."""

    part: Literal["merge", "evaluation", "drift", "language", "paired", "footprint", "parity"]
    answer: Callable[[Question, Any, Any], GateResult]
    bound: str
    unit: str
    comparison: Literal["<=", ">="] = "<="


def judge(name: str, gate: Document, measured: Measured) -> GateResult:
    """Judge one gate of a policy. Without its part of the measurements it is inconclusive."""
    row = JUDGES[name]
    question = Question(name, getattr(gate, row.bound), row.unit, row.comparison)
    part = getattr(measured, row.part)
    return unjudged(question, None, _missing(row, measured)) if part is None else row.answer(question, gate, part)


def _missing(row: Judge, measured: Measured) -> str:
    only_merged = row.part != "merge" and measured.footprint is None
    return ONLY_MERGED if only_merged else NOT_MEASURED[row.part]


def _accuracy_drop(question: Question, gate: AccuracyDrop, paired: PairedCounts) -> GateResult:
    def interval_at(n: int) -> Interval:
        lost, gained = (count * n / paired.n for count in (paired.only_baseline_right, paired.only_candidate_right))
        return paired_difference_interval(lost, gained, n, confidence=gate.confidence)

    drop = accuracy_drop(paired, confidence=gate.confidence)
    sample = None
    if drop.value is not None and drop.interval is not None:
        sample = Sample(drop.value, drop.interval, paired.n, lambda: _needed(interval_at, gate.max, paired.n))
    return judge_sample(question, sample)


def _flips(question: Question, gate: Flips, drift: DriftReport) -> GateResult:
    if drift.clusters:
        return judge_token_flips(question, gate, drift)
    flips, n = drift.flips, drift.n

    def interval_at(examples: int) -> Interval:
        return share_interval(flips * examples / n, examples, confidence=gate.confidence)

    sample = Sample(flips / n, interval_at(n), n, lambda: _needed(interval_at, gate.max_share, n)) if n else None
    return judge_sample(question, sample)


def _needed(interval_at: Callable[[int], Interval], bound: float, seen: int) -> int | None:
    return examples_needed(interval_at, bound=bound, seen=seen)


def _kl_mean(question: Question, _: Document, drift: DriftReport) -> GateResult:
    return judge_figure(question, drift.kl_mean.value)


def _kl_p99(question: Question, _: Document, drift: DriftReport) -> GateResult:
    return judge_figure(question, drift.kl_p99.value)


def _size(question: Question, _: Document, footprint: Footprint) -> GateResult:
    figure = footprint.ratio if footprint.baseline_bytes > 0 and footprint.candidate_bytes > 0 else None
    return judge_figure(question, figure)


def _speed(question: Question, gate: Speed, evaluation: EvaluationReport) -> GateResult:
    row = _latency_row(gate, evaluation.latency)
    if row.speedup_interval.confidence < SPEED_CONFIDENCE:
        why = f"{row.repeats} repeats give no {SPEED_CONFIDENCE:.0%} interval of the median; at least 6 are needed"
        return unjudged(question, row.speedup, why)
    return judge_sample(question, Sample(row.speedup, row.speedup_interval, row.repeats, lambda: None, "repeats"))


def _latency_row(gate: Speed, rows: tuple[LatencyRow, ...]) -> LatencyRow:
    for row in rows:
        if (row.batch_size, row.sequence_length) == (gate.batch_size, gate.sequence_length):
            return row
    measured = ", ".join(shape_text(row.batch_size, row.sequence_length) for row in rows) or "none"
    raise FailedPrecondition(
        f"gates.speed: shape {shape_text(gate.batch_size, gate.sequence_length)} was not measured; measured shapes "
        f"(batch size x tokens): {measured}",
        field="policy.gates.speed",
    )


def shape_text(batch_size: int, sequence_length: int) -> str:
    return f"{batch_size} x {sequence_length}"


def _parity(question: Question, _: Document, parity: ParityReport) -> GateResult:
    return judge_figure(question, parity.max_logit_difference if parity.n > 0 else None)


def _merge_difference(question: Question, _: Document, merge: MergeReport) -> GateResult:
    if not merge.reference:
        return unjudged(question, None, NO_REFERENCE)
    if not merge.layers:
        reason = next(iter(merge.not_compared.values()), "none was changed")
        return unjudged(question, None, f"no layer was compared: {reason}")
    left_out = f"; not compared: {len(merge.not_compared):,}" if merge.not_compared else ""
    result = judge_figure(question, merge.layer_difference, f"{merge.layer}, largest of {merge.layers:,}{left_out}")
    why = _too_few(merge)
    return unjudged(question, merge.layer_difference, why) if why and result.outcome is Outcome.PASSED else result


def _too_few(merge: MergeReport) -> str:
    """Why the layers that were compared cannot speak for all that changed; empty where they can.

    What no reference has a place for is left out of the comparison without harm, unless it is most of the change. What
    only the memory limit left out is not: a higher limit compares it.
    """
    left_out = len(merge.not_compared)
    everything = f"of {merge.layers + left_out:,} changed layers and tensors"
    if merge.over_memory_limit:
        limit = "a higher limits.memory_limit_bytes compares all"
        return f"the memory limit left out {merge.over_memory_limit:,} {everything}; {limit}"
    return f"{left_out:,} {everything}, more than half, could not be compared" if left_out > merge.layers else ""


def _merge_logits(question: Question, _: Document, merge: MergeReport) -> GateResult:
    logits = merge.logits
    if logits is None:
        return unjudged(question, None, merge.logits_missing)
    changes = f"{logits.label_changes:,} of {logits.n:,} positions have another largest logit"
    return judge_figure(question, logits.relative_difference, changes)


def _merge_change(question: Question, _: Document, merge: MergeReport) -> GateResult:
    largest = merge.largest_change_tensor or "no stored tensor"
    return judge_figure(question, merge.largest_change, f"{largest}, of {merge.changed:,} changed")


JUDGES: Mapping[str, Judge] = {
    "accuracy_drop": Judge("paired", _accuracy_drop, "max", "fraction"),
    "flips": Judge("drift", _flips, "max_share", "fraction"),
    "kl_mean": Judge("drift", _kl_mean, "max", "nats"),
    "kl_p99": Judge("drift", _kl_p99, "max", "nats"),
    "size": Judge("footprint", _size, "max_ratio", "ratio"),
    "speed": Judge("evaluation", _speed, "min_ratio", "ratio", ">="),
    "parity": Judge("parity", _parity, "max_logit_difference", "logits"),
    "perplexity": Judge("language", judge_perplexity, "max_ratio", "ratio"),
    "top1_agreement": Judge("language", judge_top1, "min_share", "fraction", ">="),
    "merge_difference": Judge("merge", _merge_difference, "max", "fraction"),
    "merge_logits": Judge("merge", _merge_logits, "max", "fraction"),
    "merge_change": Judge("merge", _merge_change, "max", "fraction"),
}
