"""An interval over clusters is Wilson's at the number of independent examples that tell as much."""

from __future__ import annotations

import random

import pytest

from modelpress.clustered_intervals import clustered_share
from modelpress.intervals import share_interval

T_OVER_Z_3 = (3.182446305284263 / 1.959963984540054) ** 2
"""Student's t with 3 degrees of freedom over the normal quantile, squared: tables at 0.95."""


def test_the_design_effect_is_that_of_the_ratio_estimator():
    """4 clusters of 100, 10 + 20 + 30 + 40 successes: p = 1/4, v = 4/3 * 500 / 160,000, d = v * 400 / (3/16) = 80/9."""
    share = clustered_share([(100, 10), (100, 20), (100, 30), (100, 40)], confidence=0.95)
    assert (share.share, share.n) == (0.25, 400)
    assert share.effect == pytest.approx(80 / 9 * T_OVER_Z_3, rel=1e-9)
    independent = 400 / share.effect
    expected = share_interval(independent / 4, independent, confidence=0.95)
    assert (share.interval.low, share.interval.high) == pytest.approx((expected.low, expected.high), rel=1e-12)


def test_clusters_of_unequal_size_count_by_their_examples():
    """(10, 5) and (30, 3): p = 1/5, residuals 3 and -3, v = 2 * 18 / 1600, d = v * 40 / 0.16 = 5.625."""
    t_over_z = (12.706204736174694 / 1.959963984540054) ** 2
    assert clustered_share([(10, 5), (30, 3)], confidence=0.95).effect == pytest.approx(5.625 * t_over_z, rel=1e-9)


@pytest.mark.parametrize("counts", [[(100, 25)] * 4, [(100, 0)] * 4, [(100, 100)] * 4])
def test_clusters_that_do_not_differ_tell_no_more_than_independent_examples(counts):
    assert clustered_share(counts, confidence=0.95).effect == pytest.approx(T_OVER_Z_3, rel=1e-9)


@pytest.mark.parametrize("counts", [[], [(511, 20)]])
def test_fewer_than_two_clusters_have_no_interval(counts):
    assert clustered_share(counts, confidence=0.95) is None


def test_a_share_and_its_complement_have_mirrored_intervals():
    counts = [(511, 9), (511, 2), (300, 21), (511, 6)]
    one = clustered_share(counts, confidence=0.9).interval
    other = clustered_share([(n, n - x) for n, x in counts], confidence=0.9).interval
    assert (one.low, one.high) == pytest.approx((1 - other.high, 1 - other.low), abs=1e-12)


def test_more_examples_at_the_same_rates_narrow_it_towards_the_share():
    share = clustered_share([(511, 9), (511, 2), (511, 21), (511, 6)], confidence=0.95)
    widths = [share.interval_at(n).high - share.interval_at(n).low for n in (2044, 20_440, 204_400)]
    assert widths == sorted(widths, reverse=True)
    assert share.interval_at(10**9).high == pytest.approx(share.share, abs=1e-4)


def test_it_covers_the_true_share_as_often_as_it_says():
    """Eight windows whose rates differ from each other: Wilson alone would cover half of the time."""
    rng = random.Random(7)
    covered = wilson = 0
    for _ in range(400):
        rates = [rng.betavariate(9.8, 39.2) for _ in range(8)]
        counts = [(500, round(rng.gauss(500 * p, (500 * p * (1 - p)) ** 0.5))) for p in rates]
        interval = clustered_share(counts, confidence=0.95).interval
        plain = share_interval(sum(x for _, x in counts), 4000, confidence=0.95)
        covered += interval.low <= 0.2 <= interval.high
        wilson += plain.low <= 0.2 <= plain.high
    assert 0.92 <= covered / 400 <= 0.98
    assert wilson / 400 < 0.6
