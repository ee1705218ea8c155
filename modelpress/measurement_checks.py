"""Whether a report's figures agree with the raw counts beside them.

The gate judges counts and people read figures: where the two differ, neither is to be trusted.
"""

from __future__ import annotations

import math

from modelpress.contradictions import require, require_value
from modelpress.language_checks import check_language, check_paired
from modelpress.merge_reports import LogitComparison, MergeReport
from modelpress.metrics import PairedCounts
from modelpress.reports import DriftReport, EvaluationReport, LatencyRow, Measured, QualityReport


def check_consistent(measured: Measured) -> None:
    """Raise VerificationFailed naming the first figure that its counts contradict."""
    merge, evaluation, drift, language = measured.merge, measured.evaluation, measured.drift, measured.language
    require(evaluation is None or language is None, "a model is a classifier or a language model, not both")
    answers = "evaluation" if language is None else "language"
    compared = (evaluation or language) is not None
    require(compared == (drift is not None), f"{answers} and drift are measured together, and one is missing")
    require(merge is not None or compared, "nothing was measured")
    if merge is not None:
        _check_merge(merge)
    if evaluation is not None:
        _check_evaluation(evaluation)
    if drift is not None:
        _check_drift(drift)
    if language is not None and drift is not None:
        check_language(language, drift)


def _check_merge(merge: MergeReport) -> None:
    for name in ("layers", "changed", "byte_identical"):
        require(getattr(merge, name) >= 0, f"merge.{name} is {getattr(merge, name)}")
    left_out = f"{merge.over_memory_limit} of {len(merge.not_compared)}"
    within = 0 <= merge.over_memory_limit <= len(merge.not_compared)
    require(within, f"merge.over_memory_limit counts {left_out} layers that were not compared")
    _check_largest("layer_difference", merge.layer_difference, merge.layer)
    _check_largest("largest_change", merge.largest_change, merge.largest_change_tensor)
    compared = merge.layer_difference is not None or merge.logits is not None
    require(not compared or bool(merge.reference), "merge compares with a reference that it does not name")
    require(merge.layer_difference is None or merge.layers > 0, "merge.layer_difference comes from 0 layers")
    require(merge.changed > 0 or not merge.largest_change, "merge.largest_change comes from 0 tensors")
    require(
        (merge.logits is None) == bool(merge.logits_missing),
        "merge must give either logits or the reason why there are none",
    )
    if merge.logits is not None:
        _check_logits(merge.logits)


def _check_largest(name: str, figure: float | None, owner: str) -> None:
    """A figure is not negative and belongs to a layer or tensor with a name; 0 may be nobody's."""
    if figure is None:
        require(not owner, f"merge.{name} names {owner[:120]!r} and has no figure")
        return
    require(0 <= figure < math.inf, f"merge.{name} is {figure}")
    require(bool(owner) or figure == 0, f"merge.{name} is {figure} and names no layer or tensor")


def _check_logits(logits: LogitComparison) -> None:
    require(logits.n > 0, "merge.logits compares 0 positions")
    require(0 <= logits.label_changes <= logits.n, f"merge.logits counts {logits.label_changes} changes of {logits.n}")
    for name in ("max_difference", "max_logit"):
        require(0 <= getattr(logits, name) < math.inf, f"merge.logits.{name} is {getattr(logits, name)}")


def _check_evaluation(evaluation: EvaluationReport) -> None:
    paired = evaluation.paired
    check_paired(paired)
    _check_quality("baseline", evaluation.baseline, paired, paired.both_right + paired.only_baseline_right)
    _check_quality("candidate", evaluation.candidate, paired, paired.both_right + paired.only_candidate_right)
    require_value("accuracy_drop", evaluation.accuracy_drop, paired.accuracy_drop if paired.n else None)
    for row in evaluation.latency:
        _check_speedup(row)


def _check_drift(drift: DriftReport) -> None:
    require(0 <= drift.flips <= drift.n, f"drift counts {drift.flips} flips among {drift.n} probes")
    require_value("flip_share", drift.flip_share, drift.flips / drift.n if drift.n else None)
    for cluster in drift.clusters:
        within = 0 <= cluster.flips <= cluster.n and cluster.n > 0
        require(within, f"drift counts {cluster.flips} flips among {cluster.n} tokens of a window")
    if drift.clusters:
        counted = tuple(sum(getattr(cluster, name) for cluster in drift.clusters) for name in ("flips", "n"))
        sums = f"drift counts {drift.flips} flips of {drift.n}, its windows {counted[0]} of {counted[1]}"
        require(counted == (drift.flips, drift.n), sums)


def _check_quality(role: str, quality: QualityReport, paired: PairedCounts, right: int) -> None:
    rows = quality.confusion
    size = len(quality.labels)
    square = len(rows) == size and all(len(row) == size for row in rows)
    require(square, f"the {role}'s confusion matrix is not {size} x {size}")
    total, diagonal = sum(map(sum, rows)), sum(row[i] for i, row in enumerate(rows))
    require(total == paired.n, f"the {role}'s confusion matrix holds {total} examples, the paired counts {paired.n}")
    require(diagonal == right, f"the {role}'s confusion matrix has {diagonal} right, the paired counts {right}")
    require_value(f"{role}.accuracy", quality.accuracy, right / paired.n if paired.n else None)


def _check_speedup(row: LatencyRow) -> None:
    ends = row.speedup_interval
    shape = f"{row.batch_size} x {row.sequence_length}"
    require(ends.low <= row.speedup <= ends.high, f"the speed-up at {shape} lies outside its own interval")
