"""Drift is exact where it can be worked out, never negative, and stable where a plain formula overflows."""

from __future__ import annotations

import math

import numpy as np
import pytest

from evaluators.drift import kl_divergence, log10_histogram, measure_drift, percentile
from evaluators.predictions import Predictions
from modelpress.errors import InvalidRequest


def _predictions(logits, labels=("no", "yes")) -> Predictions:
    return Predictions(labels, np.array(logits, dtype=np.float32), None, 0, "onnxruntime")


def test_kl_is_the_sum_of_p_log_p_over_q():
    p, q = (0.5, 0.5), (0.9, 0.1)
    expected = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    found = kl_divergence(np.log([p]).astype(np.float32), np.log([q]).astype(np.float32))
    assert found[0] == pytest.approx(expected, rel=1e-6)


def test_kl_is_from_baseline_to_candidate():
    a, b = np.float32([[0, 3]]), np.float32([[1, 0]])
    assert kl_divergence(a, b)[0] != pytest.approx(kl_divergence(b, a)[0])
    # p = (1, e^3) / (1 + e^3), q = (e, 1) / (1 + e)
    p = 1 / (1 + math.exp(3))
    expected = p * math.log(p * (1 + math.e) / math.e) + (1 - p) * math.log((1 - p) * (1 + math.e))
    assert kl_divergence(a, b)[0] == pytest.approx(expected, rel=1e-12)


def test_equal_or_shifted_logits_have_no_divergence():
    logits = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    assert kl_divergence(logits, logits).tolist() == [0.0] * 50
    assert kl_divergence(logits, logits + np.float32(8)).max() < 1e-12


def test_kl_of_huge_logits_is_finite_and_exact():
    # p = (1, 0), q = (e^-2000, 1): KL = 2000
    assert kl_divergence(np.float32([[1000, -1000]]), np.float32([[-1000, 1000]])).tolist() == [2000.0]


def test_kl_is_never_negative():
    generator = np.random.default_rng(1)
    logits = generator.normal(size=(10_000, 3)).astype(np.float32)
    assert kl_divergence(logits, logits + generator.normal(size=logits.shape).astype(np.float32) * 1e-7).min() >= 0


@pytest.mark.parametrize(("n", "expected"), [(1, 1), (99, 99), (100, 99), (101, 100), (2101, 2080)])
def test_the_99th_percentile_is_a_value_that_99_per_cent_do_not_exceed(n, expected):
    values = np.random.default_rng(2).permutation(np.arange(1.0, n + 1))
    assert percentile(values, 99) == expected
    assert (values <= expected).mean() >= 0.99 > (values < expected).mean() or n < 100


def test_the_histogram_counts_every_value_once():
    histogram = log10_histogram(np.array([0.0, 1e-9, 1e-8, 1.5e-3, 1.0, 9.99, 10.0, 1e6]))
    assert (len(histogram.edges), sum(histogram.counts)) == (37, 8)
    assert (histogram.edges[0], histogram.edges[-1]) == (-8.0, 1.0)
    bins = {round(edge, 2): count for edge, count in zip(histogram.edges, histogram.counts, strict=False) if count}
    assert bins == {-8.0: 3, -3.0: 1, 0.0: 1, 0.75: 3}


def test_flips_and_the_largest_moves_are_named_by_label_and_place():
    baseline = _predictions([[2, 0], [0, 2], [1, 0]] + [[1, 0]] * 12)
    candidate = _predictions([[2, 0], [3, 0], [0, 0.5]] + [[1, 0]] * 12).in_order(("yes", "no"))
    report = measure_drift(baseline, candidate, probes="sha256:p", confidence=0.9)
    assert (report.n, report.flips, report.flip_share.value) == (15, 2, 2 / 15)
    assert report.flip_share.interval.confidence == 0.9
    assert len(report.largest) == 10
    first, second = report.largest[:2]
    assert (first.index, first.baseline_label, first.candidate_label) == (1, "yes", "no")
    assert (second.index, second.baseline_label, second.candidate_label) == (2, "no", "yes")
    assert report.kl_p99.value == first.kl
    assert report.kl_mean.value == pytest.approx((first.kl + second.kl) / 15)


def test_drift_of_different_probes_is_refused():
    with pytest.raises(InvalidRequest, match="2 and 1 probes"):
        measure_drift(_predictions([[0, 1]] * 2), _predictions([[0, 1]]), probes="sha256:p", confidence=0.95)
