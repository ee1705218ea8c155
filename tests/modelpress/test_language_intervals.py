"""Intervals over windows: quantiles against tables, ends against the formula worked out by hand."""

from __future__ import annotations

import math

import pytest

from modelpress.errors import InvalidRequest
from modelpress.language_intervals import mean_per_token_interval, paired_ratio_interval, safe_exp, student_t
from modelpress.language_reports import TokenWindow


def window(tokens: int, baseline: float, candidate: float) -> TokenWindow:
    return TokenWindow(tokens=tokens, baseline_nats=baseline, candidate_nats=candidate, kl_nats=0.0, agreements=tokens)


@pytest.mark.parametrize(
    ("degrees", "confidence", "table"),
    [(1, 0.95, 12.706), (2, 0.95, 4.303), (3, 0.9, 2.353), (10, 0.99, 3.169), (120, 0.95, 1.980), (4, 0.999, 8.610)],
)
def test_the_quantile_is_that_of_the_printed_tables(degrees, confidence, table):
    assert student_t(confidence, degrees=degrees) == pytest.approx(table, abs=6e-4)


def test_one_degree_of_freedom_is_the_cauchy_distribution():
    assert student_t(0.9, degrees=1) == pytest.approx(math.tan(0.9 * math.pi / 2), rel=1e-12)


@pytest.mark.parametrize(("confidence", "degrees"), [(0.0, 3), (1.0, 3), (0.95, 0)])
def test_an_impossible_quantile_is_refused(confidence, degrees):
    with pytest.raises(InvalidRequest, match="degrees of freedom"):
        student_t(confidence, degrees=degrees)


def test_windows_of_one_length_give_the_t_interval_of_their_means():
    means = (0.1, 0.2, 0.6)
    interval = mean_per_token_interval([10 * mean for mean in means], [10, 10, 10], confidence=0.95)
    deviation = math.sqrt(sum((mean - 0.3) ** 2 for mean in means) / 2)
    half = 4.302652729911275 * deviation / math.sqrt(3)
    assert (interval.low, interval.high) == pytest.approx((0.3 - half, 0.3 + half), rel=1e-9)


def test_a_short_window_weighs_as_much_as_its_tokens():
    interval = mean_per_token_interval([10.0, 2.0], [10, 1], confidence=0.95)
    mean = 12 / 11
    squares = (10 - mean * 10) ** 2 + (2 - mean) ** 2
    half = 12.706204736174694 * math.sqrt(2 / 1 * squares) / 11
    assert (interval.low, interval.high) == pytest.approx((mean - half, mean + half), rel=1e-9)


def test_the_ratio_is_paired_what_is_hard_for_both_cancels():
    windows = [window(100, nats, nats + 10) for nats in (100.0, 500.0, 300.0)]
    interval = paired_ratio_interval(windows, confidence=0.95)
    assert (interval.low, interval.high) == pytest.approx((math.exp(0.1), math.exp(0.1)), rel=1e-12)


def test_one_window_has_no_interval():
    assert paired_ratio_interval([window(100, 300, 310)], confidence=0.95) is None
    assert paired_ratio_interval([], confidence=0.95) is None


def test_a_ratio_that_no_float_holds_is_infinite():
    assert safe_exp(1e6) == math.inf
    interval = paired_ratio_interval([window(1, 0, 2000), window(1, 0, 2100)], confidence=0.95)
    assert interval.high == math.inf
