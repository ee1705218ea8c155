"""Drift of a language model: how far the candidate's next tokens moved from the baseline's, on the probe texts."""

from __future__ import annotations

import math

import numpy as np

from evaluators.drift import LARGEST, log10_histogram, percentile
from evaluators.token_figures import TokenFigures
from modelpress.clustered_intervals import clustered_share
from modelpress.metrics import Metric
from modelpress.reports import Cluster, DriftExample, DriftReport


def measure_token_drift(figures: TokenFigures, *, probes: str, confidence: float) -> DriftReport:
    """Flips are tokens where another one is the most likely; `probes` is the digest of the probe texts.

    The windows are the clusters, and the interval of the flips is over them: none where there is only one.
    """
    n, flips = len(figures), int((~figures.agree).sum())
    clusters = token_clusters(figures)
    share = clustered_share([(cluster.n, cluster.flips) for cluster in clusters], confidence=confidence)
    return DriftReport(
        probes=probes,
        n=n,
        flips=flips,
        flip_share=Metric(
            name="flip_share", value=flips / n, unit="fraction", n=n, interval=share.interval if share else None
        ),
        kl_mean=Metric(name="kl_mean", value=math.fsum(figures.kl.tolist()) / n, unit="nats", n=n),
        kl_p99=Metric(name="kl_p99", value=percentile(figures.kl, 99), unit="nats", n=n),
        kl_histogram=log10_histogram(figures.kl),
        largest=_largest(figures),
        clusters=clusters,
    )


def token_clusters(figures: TokenFigures) -> tuple[Cluster, ...]:
    """Tokens and flips of each window."""
    flips = np.add.reduceat((~figures.agree).astype(np.int64), figures.starts)
    return tuple(Cluster(n=n, flips=x) for n, x in zip(figures.window_tokens.tolist(), flips.tolist(), strict=True))


def _largest(figures: TokenFigures) -> tuple[DriftExample, ...]:
    """The tokens that moved most, the first of equals first; a label is the text of the most likely token."""
    order = np.argsort(-figures.kl, kind="stable")[:LARGEST].tolist()
    text = figures.facts.answers
    return tuple(
        DriftExample(
            index=i,
            baseline_label=text[int(figures.baseline_top[i])],
            candidate_label=text[int(figures.candidate_top[i])],
            kl=float(figures.kl[i]),
        )
        for i in order
    )
