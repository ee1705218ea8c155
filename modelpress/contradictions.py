"""How a figure that contradicts its counts is refused: one kind of error, one way to compare."""

from __future__ import annotations

import math

from modelpress.errors import VerificationFailed
from modelpress.metrics import Metric


def require(holds: bool, sentence: str) -> None:
    """Raise VerificationFailed with the sentence unless it holds."""
    if not holds:
        raise VerificationFailed(f"the measurements contradict each other: {sentence}", reason="CONTRADICTORY_REPORT")


def require_value(name: str, metric: Metric, computed: float | None, *, tolerance: float = 1e-12) -> None:
    """The metric's value is what its counts give, to `tolerance` (absolute up to 1, relative above)."""
    value = metric.value
    if value is None or computed is None:
        agree = value is computed
    else:
        agree = math.isclose(value, computed, rel_tol=tolerance, abs_tol=tolerance)
    require(agree, f"{name} is {value} in the report, but its counts give {computed}")
