"""Intervals agree with the literature, with the likelihood that they come from, and cover what they claim."""

from __future__ import annotations

import math

import pytest

from modelpress.errors import InvalidRequest
from modelpress.intervals import (
    accuracy_drop,
    examples_needed,
    median_interval,
    median_ranks,
    paired_difference_interval,
    share_interval,
    tango_statistic,
)
from modelpress.metrics import PairedCounts


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_gives_the_values_of_newcombe_1998_table_1(successes, n, low, high):
    interval = share_interval(successes, n, confidence=0.95)
    assert (round(interval.low, 4), round(interval.high, 4)) == (low, high)
    assert interval.method == "Wilson 1927"


@pytest.mark.parametrize(
    ("first", "second", "n", "confidence", "ends"),
    [
        # Fagerland, Lydersen and Laake 2014 (Stat. Med. 33:2850): airway hyper-responsiveness; complete response.
        (1, 7, 21, 0.95, ("-0.517", "-0.026")),
        (6, 16, 161, 0.95, ("-0.1240", "-0.0054")),
        # What R's PropCIs::scoreci.mp(25, 28, 618, 0.90) prints.
        (28, 25, 618, 0.90, ("-0.0148", "0.0247")),
    ],
)
def test_tango_gives_published_values(first, second, n, confidence, ends):
    interval = paired_difference_interval(first, second, n, confidence=confidence)
    digits = len(ends[0].split(".")[1])
    assert (f"{interval.low:.{digits}f}", f"{interval.high:.{digits}f}") == ends
    assert interval.method == "Tango 1998"


@pytest.mark.parametrize("n", [5, 100, 2101])
def test_without_discordant_pairs_tango_is_the_score_interval_of_no_event(n):
    z2 = 1.959963984540054**2
    interval = paired_difference_interval(0, 0, n, confidence=0.95)
    assert interval.high == pytest.approx(z2 / (n + z2), abs=1e-12)
    assert interval.low == pytest.approx(-interval.high, abs=1e-12)


def test_swapping_the_conditions_mirrors_tangos_interval():
    one = paired_difference_interval(17, 4, 300, confidence=0.9)
    other = paired_difference_interval(4, 17, 300, confidence=0.9)
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low), abs=1e-12)


@pytest.mark.parametrize(("first", "second", "n"), [(7, 1, 21), (3, 9, 40), (0, 5, 30)])
@pytest.mark.parametrize("difference", [-0.3, -0.05, 0.02, 0.25])
def test_tangos_statistic_uses_the_likelihoods_own_maximum(first, second, n, difference):
    """Against a search for the q that maximises the multinomial likelihood under the hypothesis."""

    def log_likelihood(q: float) -> float:
        cells = ((first, q + difference), (second, q), (n - first - second, 1 - 2 * q - difference))
        return sum(count * math.log(p) for count, p in cells if count)

    low, high = max(0.0, -difference) + 1e-13, (1 - difference) / 2 - 1e-13
    for _ in range(200):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        low, high = (a, high) if log_likelihood(a) < log_likelihood(b) else (low, b)
    variance = n * (2 * low + difference * (1 - difference))
    expected = (first - second - n * difference) / math.sqrt(variance)
    found = tango_statistic(difference, only_first=first, only_second=second, n=n)
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("p_first", "p_second"), [(0.05, 0.05), (0.15, 0.05), (0.3, 0.1)])
def test_tangos_interval_covers_the_difference_as_often_as_it_says(p_first, p_second):
    """Exact coverage over every table of n = 60: never far below 0.95 (Tango reports 0.93 to 0.97 at such n)."""
    n, covered = 60, 0.0
    for first in range(n + 1):
        for second in range(n + 1 - first):
            weight = (math.comb(n, first) * math.comb(n - first, second) * p_first**first * p_second**second) * (
                1 - p_first - p_second
            ) ** (n - first - second)
            if weight > 1e-7:
                interval = paired_difference_interval(first, second, n, confidence=0.95)
                covered += weight * (interval.low <= p_first - p_second <= interval.high)
    assert 0.935 < covered < 0.98


@pytest.mark.parametrize(("n", "rank"), [(6, 1), (10, 2), (20, 6), (40, 14), (100, 40)])
def test_median_ranks_are_those_of_the_binomial_tables(n, rank):
    found, covered = median_ranks(n, confidence=0.95)
    assert found == rank
    assert covered == pytest.approx(1 - 2 * sum(math.comb(n, k) for k in range(rank)) / 2**n)
    assert 1 - 2 * sum(math.comb(n, k) for k in range(rank + 1)) / 2**n < 0.95 <= covered


def test_too_few_values_span_everything_and_state_the_confidence_that_is_left():
    interval = median_interval([3.0, 1.0, 2.0], confidence=0.95)
    assert (interval.low, interval.high, interval.confidence) == (1.0, 3.0, 0.75)


def test_examples_needed_is_the_first_n_that_tells():
    def share_at(n: int):
        return share_interval(0.02 * n, n, confidence=0.95)

    needed = examples_needed(share_at, bound=0.03, seen=100)
    assert share_at(needed).high <= 0.03 < share_at(needed - 1).high


def test_no_number_of_examples_tells_a_figure_from_itself():
    assert examples_needed(lambda n: share_interval(0.03 * n, n, confidence=0.95), bound=0.03, seen=100) is None
    assert examples_needed(lambda n: share_interval(0, n, confidence=0.95), bound=0.0, seen=100) is None


def test_the_accuracy_drop_of_no_example_is_none():
    metric = accuracy_drop(
        PairedCounts(both_right=0, only_baseline_right=0, only_candidate_right=0, both_wrong=0), confidence=0.95
    )
    assert (metric.value, metric.interval, metric.n) == (None, None, 0)


@pytest.mark.parametrize("arguments", [(5, 4), (-1, 4), (0, 0)])
def test_impossible_counts_are_refused(arguments):
    with pytest.raises(InvalidRequest):
        share_interval(*arguments, confidence=0.95)


def test_impossible_paired_counts_and_confidences_are_refused():
    with pytest.raises(InvalidRequest, match="paired counts"):
        paired_difference_interval(3, 3, 5, confidence=0.95)
    with pytest.raises(InvalidRequest, match=r"confidence 1\.0"):
        share_interval(1, 2, confidence=1.0)
