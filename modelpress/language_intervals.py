"""Confidence intervals over the windows of a text: tokens of one window depend on each other, windows hardly do.

    >>> windows = [TokenWindow(tokens=100, baseline_nats=300, candidate_nats=c, kl_nats=1, agreements=90)
    ...            for c in (305.0, 312.0, 309.0)]
    >>> interval = paired_ratio_interval(windows, confidence=0.95)
    >>> f"{interval.low:.4f} {interval.high:.4f}"
    '0.9994 1.1899'

Pure Python, like `modelpress.intervals`: a stored report is judged again anywhere, to the same last digit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

from modelpress.errors import InvalidRequest
from modelpress.language_reports import TokenWindow
from modelpress.metrics import Interval

METHOD = "ratio estimator over windows, Student t (Cochran 1977)"
MAX_STEPS = 200


def paired_ratio_interval(windows: Sequence[TokenWindow], *, confidence: float) -> Interval | None:
    """Of the perplexity ratio, candidate over baseline: exp of the interval of the mean log-ratio per token.

    Both models predict the same tokens, so that what makes a window hard for both cancels. None for fewer than two
    windows.
    """
    log_ratios = [window.candidate_nats - window.baseline_nats for window in windows]
    interval = mean_per_token_interval(log_ratios, [window.tokens for window in windows], confidence=confidence)
    return None if interval is None else exponential(interval)


def mean_per_token_interval(sums: Sequence[float], tokens: Sequence[int], *, confidence: float) -> Interval | None:
    """Of sum(sums) / sum(tokens), where window i has the sum `sums[i]` over `tokens[i]` tokens.

    The ratio estimator of cluster sampling (Cochran 1977, Sampling Techniques, section 6.4, without the correction for
    a finite population): W windows, mean r, variance W / (W - 1) * sum((sums_i - r tokens_i)^2) / sum(tokens)^2, and
    Student's t with W - 1 degrees of freedom. None for fewer than two windows.
    """
    if len(sums) < 2:
        return None
    count, total = len(sums), sum(tokens)
    mean = math.fsum(sums) / total
    squares = math.fsum((value - mean * weight) ** 2 for value, weight in zip(sums, tokens, strict=True))
    half = student_t(confidence, degrees=count - 1) * math.sqrt(squares * count / (count - 1)) / total
    return Interval(low=mean - half, high=mean + half, confidence=confidence, method=METHOD)


def exponential(interval: Interval) -> Interval:
    """The interval of exp(x), from that of x; inf where a float cannot hold it."""
    return interval.model_copy(update={"low": safe_exp(interval.low), "high": safe_exp(interval.high)})


def safe_exp(nats: float) -> float:
    """exp, and inf instead of an overflow."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def student_t(confidence: float, *, degrees: int) -> float:
    """The two-sided quantile of Student's t, e.g. 2.776 for 0.95 and 4 degrees of freedom.

    By Newton's method from the normal quantile, which is smaller: the probability is concave there, so that every step
    ends at or before the solution.
    """
    if not 0 < confidence < 1 or degrees < 1:
        raise InvalidRequest(
            f"confidence {confidence} with {degrees} degrees of freedom: (0, 1) and at least 1 are needed"
        )
    t = NormalDist().inv_cdf(0.5 + confidence / 2)
    for _ in range(MAX_STEPS):
        step = (confidence - _within(t, degrees)) / (2 * _density(t, degrees))
        if step <= 1e-15 * t:
            break
        t += step
    return t


def _within(t: float, degrees: int) -> float:
    """P(|T| <= t): the finite sums of Abramowitz and Stegun 1964, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine_squared = math.cos(angle) ** 2
    odd = degrees % 2
    term, total = (math.cos(angle), 0.0) if odd else (1.0, 0.0)
    for k in range(degrees // 2):
        total += term
        factor = (2 * k + 2) / (2 * k + 3) if odd else (2 * k + 1) / (2 * k + 2)
        term *= cosine_squared * factor
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total


def _density(t: float, degrees: int) -> float:
    log_constant = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
    return math.exp(log_constant - (degrees + 1) / 2 * math.log1p(t * t / degrees))
