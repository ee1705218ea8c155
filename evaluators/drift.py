"""Drift: how far the candidate's answers moved from the baseline's, whether they are right or not.

Shapes: N rows, K labels.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from evaluators.predictions import Predictions
from modelpress.errors import InvalidRequest
from modelpress.intervals import share_interval
from modelpress.metrics import Metric
from modelpress.reports import DriftExample, DriftReport, Histogram

VERSION = 1
LOG10_RANGE = (-8.0, 1.0)
BINS = 36
LARGEST = 10


def measure_drift(baseline: Predictions, candidate: Predictions, *, probes: str, confidence: float) -> DriftReport:
    """Flipped labels and KL(baseline || candidate) over the same probes; `probes` is their dataset's digest."""
    candidate = candidate.in_order(baseline.labels)
    n = len(baseline)
    if len(candidate) != n:
        raise InvalidRequest(f"baseline and candidate were predicted on {n} and {len(candidate)} probes: use the same")
    kl_N = kl_divergence(baseline.logits, candidate.logits)
    flips = int((baseline.answers != candidate.answers).sum())
    return DriftReport(
        probes=probes,
        n=n,
        flips=flips,
        flip_share=Metric(
            name="flip_share",
            value=flips / n,
            unit="fraction",
            n=n,
            interval=share_interval(flips, n, confidence=confidence),
        ),
        kl_mean=Metric(name="kl_mean", value=math.fsum(kl_N.tolist()) / n, unit="nats", n=n),
        kl_p99=Metric(name="kl_p99", value=percentile(kl_N, 99), unit="nats", n=n),
        kl_histogram=log10_histogram(kl_N),
        largest=_largest(kl_N, baseline, candidate),
    )


def kl_divergence(baseline_NK: NDArray[np.float32], candidate_NK: NDArray[np.float32]) -> NDArray[np.float64]:
    """KL(baseline || candidate) in nats of each row's softmax, from logits, in float64.

    0 exactly for equal logits and for logits shifted by a constant per row up to rounding; never negative.
    """
    p_NK, q_NK = _log_softmax(baseline_NK), _log_softmax(candidate_NK)
    kl_N: NDArray[np.float64] = np.maximum(0.0, (np.exp(p_NK) * (p_NK - q_NK)).sum(axis=1))
    return kl_N


def percentile(values_N: NDArray[np.float64], percent: float) -> float:
    """Nearest-rank percentile: the smallest value that at least `percent` per cent of the values do not exceed."""
    rank = max(1, math.ceil(len(values_N) * percent / 100))
    return float(np.sort(values_N)[rank - 1])


def log10_histogram(values_N: NDArray[np.float64]) -> Histogram:
    """Of log10 of the values, clipped to `LOG10_RANGE`: 0 counts in the first bin."""
    tiny = 10.0 ** LOG10_RANGE[0]
    logs_N = np.clip(np.log10(np.maximum(values_N, tiny)), *LOG10_RANGE)
    counts, edges = np.histogram(logs_N, bins=BINS, range=LOG10_RANGE)
    return Histogram(edges=tuple(edges.tolist()), counts=tuple(counts.tolist()))


def _log_softmax(logits_NK: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted_NK = logits_NK.astype(np.float64)
    shifted_NK -= shifted_NK.max(axis=1, keepdims=True)
    normalized: NDArray[np.float64] = shifted_NK - np.log(np.exp(shifted_NK).sum(axis=1, keepdims=True))
    return normalized


def _largest(kl_N: NDArray[np.float64], baseline: Predictions, candidate: Predictions) -> tuple[DriftExample, ...]:
    """The probes that moved most, the first of equals first."""
    order = np.argsort(-kl_N, kind="stable")[:LARGEST].tolist()
    return tuple(
        DriftExample(
            index=i,
            baseline_label=baseline.labels[baseline.answers[i]],
            candidate_label=candidate.labels[candidate.answers[i]],
            kl=float(kl_N[i]),
        )
        for i in order
    )
