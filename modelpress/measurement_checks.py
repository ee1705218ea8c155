"""Whether a report's figures agree with the raw counts beside them.

The gate judges counts and people read figures: where the two differ, neither is to be trusted.
"""

from __future__ import annotations

import math

from modelpress.errors import VerificationFailed
from modelpress.reports import DriftReport, EvaluationReport, LatencyRow, Metric, PairedCounts, QualityReport


def check_consistent(evaluation: EvaluationReport, drift: DriftReport) -> None:
    """Raise VerificationFailed naming the first figure that its counts contradict."""
    paired = evaluation.paired
    _check(min(paired.model_dump().values()) >= 0, "the paired counts hold a negative number")
    _check_quality("baseline", evaluation.baseline, paired, paired.both_right + paired.only_baseline_right)
    _check_quality("candidate", evaluation.candidate, paired, paired.both_right + paired.only_candidate_right)
    _check_value("accuracy_drop", evaluation.accuracy_drop, paired.accuracy_drop if paired.n else None)
    for row in evaluation.latency:
        _check_speedup(row)
    _check(0 <= drift.flips <= drift.n, f"drift counts {drift.flips} flips among {drift.n} probes")
    _check_value("flip_share", drift.flip_share, drift.flips / drift.n if drift.n else None)


def _check_quality(role: str, quality: QualityReport, paired: PairedCounts, right: int) -> None:
    rows = quality.confusion
    size = len(quality.labels)
    square = len(rows) == size and all(len(row) == size for row in rows)
    _check(square, f"the {role}'s confusion matrix is not {size} x {size}")
    total, diagonal = sum(map(sum, rows)), sum(row[i] for i, row in enumerate(rows))
    _check(total == paired.n, f"the {role}'s confusion matrix holds {total} examples, the paired counts {paired.n}")
    _check(diagonal == right, f"the {role}'s confusion matrix has {diagonal} right, the paired counts {right}")
    _check_value(f"{role}.accuracy", quality.accuracy, right / paired.n if paired.n else None)


def _check_speedup(row: LatencyRow) -> None:
    ends = row.speedup_interval
    shape = f"{row.batch_size} x {row.sequence_length}"
    _check(ends.low <= row.speedup <= ends.high, f"the speed-up at {shape} lies outside its own interval")


def _check_value(name: str, metric: Metric, computed: float | None) -> None:
    value = metric.value
    if value is None or computed is None:
        agree = value is computed
    else:
        agree = math.isclose(value, computed, rel_tol=0, abs_tol=1e-12)
    _check(agree, f"{name} is {value} in the report, but its counts give {computed}")


def _check(holds: bool, sentence: str) -> None:
    if not holds:
        raise VerificationFailed(f"the measurements contradict each other: {sentence}", reason="CONTRADICTORY_REPORT")
