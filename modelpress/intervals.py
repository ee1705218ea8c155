"""Confidence intervals for what a gate judges: a share, a paired difference of shares, a median.

    >>> interval = share_interval(81, 263, confidence=0.95)
    >>> f"{interval.low:.4f} {interval.high:.4f} {interval.method}"
    '0.2553 0.3662 Wilson 1927'

Pure Python, so that a stored report is judged again anywhere, to the same last digit, without numpy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

from modelpress.errors import InvalidRequest
from modelpress.metrics import Interval, Metric, PairedCounts

BISECTIONS = 100
MAX_EXAMPLES = 1_000_000_000
"""Beyond this many examples a set is called impossible rather than too small."""


def share_interval(successes: float, n: float, *, confidence: float) -> Interval:
    """Wilson's score interval for a binomial share (Wilson 1927, JASA 22:209-212).

    Counts may be fractional, for intervals at another n and the same rate. Always inside [0, 1], and at most
    `successes / n` at the low and at least that at the high end.
    """
    _check(0 <= successes <= n and n > 0, f"{successes} of {n} is not a share")
    z = _z(confidence)
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return Interval(low=low, high=high, confidence=confidence, method="Wilson 1927")


def paired_difference_interval(only_first: float, only_second: float, n: float, *, confidence: float) -> Interval:
    """Tango's score interval for the difference of two shares of the same n examples (1998, Stat. Med. 17:891-908).

    The difference is (only_first - only_second) / n, where only_first counts the examples that succeed under the first
    condition alone. It holds every difference that the score test does not reject, found by bisection: the test
    statistic falls as the hypothetical difference rises. Counts may be fractional.
    """
    _check(
        only_first >= 0 and only_second >= 0 and only_first + only_second <= n and n > 0,
        f"{only_first} and {only_second} discordant pairs of {n} are not paired counts",
    )
    z = _z(confidence)
    seen = (only_first - only_second) / n

    def excess(difference: float) -> float:
        return tango_statistic(difference, only_first=only_first, only_second=only_second, n=n)

    low = _crossing(lambda d: excess(d) - z, -1.0, seen)
    high = _crossing(lambda d: excess(d) + z, seen, 1.0)
    return Interval(low=low, high=high, confidence=confidence, method="Tango 1998")


def tango_statistic(difference: float, *, only_first: float, only_second: float, n: float) -> float:
    """The score statistic of "the shares differ by `difference`": standard normal where that is true.

    The variance uses the maximum-likelihood estimate, under that hypothesis, of the probability of `only_second`:
    the larger root of A q^2 + B q + C = 0 of Tango's equation.
    """
    a = 2 * n
    b = -only_first - only_second + (2 * n - only_first + only_second) * difference
    c = -only_second * difference * (1 - difference)
    root = math.sqrt(max(0.0, b * b - 4 * a * c))
    q = -2 * c / (b + root) if b > 0 else (root - b) / (2 * a)
    variance = n * (2 * q + difference * (1 - difference))
    excess = only_first - only_second - n * difference
    if variance <= 0:
        return math.copysign(math.inf, excess) if excess else 0.0
    return excess / math.sqrt(variance)


def median_interval(values: Sequence[float], *, confidence: float) -> Interval:
    """Order-statistic interval of a median: exact for independent values of any continuous distribution.

    The ends are the r-th smallest and the r-th largest value, r as large as the binomial distribution allows. The
    interval's own `confidence` is the exact one of these ends: at least the one asked for, except where there are too
    few values for any interval (below 6 at 0.95); then it spans all values and states the lower confidence it has.
    """
    _check(len(values) > 0, "no values have no median")
    ordered = sorted(values)
    rank, covered = median_ranks(len(ordered), confidence=confidence)
    return Interval(low=ordered[rank - 1], high=ordered[-rank], confidence=covered, method="binomial order statistics")


def median_ranks(n: int, *, confidence: float) -> tuple[int, float]:
    """Rank r from either end, and the exact probability 1 - 2 P[Binomial(n, 1/2) < r] that the median lies between."""
    outside, term, rank = 1, 1, 1
    while rank < (n + 1) // 2:
        term = term * (n - rank + 1) // rank
        if 1 - 2 * (outside + term) / 2**n < confidence:
            break
        outside, rank = outside + term, rank + 1
    return rank, max(0.0, 1 - 2 * outside / 2**n)


def accuracy_drop(paired: PairedCounts, *, confidence: float) -> Metric:
    """Baseline accuracy minus candidate accuracy over the same examples, with Tango's interval; None for no example."""
    if paired.n == 0:
        return Metric(name="accuracy_drop", value=None, unit="fraction", n=0)
    lost, gained = paired.only_baseline_right, paired.only_candidate_right
    interval = paired_difference_interval(lost, gained, paired.n, confidence=confidence)
    return Metric(name="accuracy_drop", value=paired.accuracy_drop, unit="fraction", n=paired.n, interval=interval)


def examples_needed(interval_at: Callable[[int], Interval], *, bound: float, seen: int) -> int | None:
    """The smallest n from `seen` on at which `interval_at(n)`, the interval at the rates seen, tells on which side of
    `bound` the figure lies.

    None where no n up to a thousand million does: the figure equals the bound, or a bound of 0 is asked of a share.
    """
    low, high = seen, seen
    while holds(interval_at(high), bound):
        if high >= MAX_EXAMPLES:
            return None
        low, high = high, min(2 * high, MAX_EXAMPLES)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(interval_at(middle), bound) else (low, middle)
    return high


def holds(interval: Interval, bound: float) -> bool:
    """Whether a figure that must be at most `bound` may lie on either side of it."""
    return interval.low <= bound < interval.high


def _crossing(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a falling function changes its sign; an end of the range where it does not."""
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return (low + high) / 2


def _z(confidence: float) -> float:
    """The two-sided normal quantile, e.g. 1.96 for 0.95."""
    _check(0 < confidence < 1, f"confidence {confidence} is not between 0 and 1")
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def _check(holds_true: bool, sentence: str) -> None:
    if not holds_true:
        raise InvalidRequest(sentence)
