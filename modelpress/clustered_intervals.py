"""Interval of a share whose examples come in clusters: the tokens of one window are not independent of each other.

    >>> share = clustered_share([(511, 9), (511, 2), (511, 21), (511, 6)], confidence=0.95)
    >>> f"{share.interval.low:.4f} {share.interval.high:.4f}"
    '0.0051 0.0652'

Pure Python, like `modelpress.intervals`. A cluster is (n, successes), n > 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from modelpress.intervals import share_interval
from modelpress.language_intervals import student_t
from modelpress.metrics import Interval

Cluster = tuple[int, int]
METHOD = "Wilson 1927, design effect of Rao & Scott 1992, t of Korn & Graubard 1998"


@dataclass(frozen=True)
class ClusteredShare:
    """A share of n examples in clusters. `effect`: how many of them tell as much as one independent example."""

    share: float
    n: int
    effect: float
    confidence: float

    @property
    def interval(self) -> Interval:
        return self.interval_at(self.n)

    def interval_at(self, n: int) -> Interval:
        """Wilson's interval of as many independent examples as n of these tell: at the share and the effect seen."""
        effective = n / self.effect
        wilson = share_interval(self.share * effective, effective, confidence=self.confidence)
        return wilson.model_copy(update={"method": METHOD})


def clustered_share(clusters: Sequence[Cluster], *, confidence: float) -> ClusteredShare | None:
    """None for fewer than 2 clusters: these do not show how much one differs from another."""
    if len(clusters) < 2:
        return None
    n, successes = sum(n for n, _ in clusters), sum(x for _, x in clusters)
    return ClusteredShare(successes / n, n, _design_effect(clusters, confidence), confidence)


def _design_effect(clusters: Sequence[Cluster], confidence: float) -> float:
    """The variance of the ratio estimator p = X / N over the binomial one (Rao & Scott 1992, Biometrics 48:577-585),

        v = m / (m - 1) * sum (x_i - p n_i)^2 / N^2,    d = v N / (p (1 - p)),

    at least 1, times (t / z)^2 of Student's t with m - 1 degrees of freedom, because m clusters estimate it (Korn &
    Graubard 1998, Surv. Methodol. 24:193-201). Where no, or every, example is a success, nothing varies and d is 1.
    """
    m, total = len(clusters), sum(n for n, _ in clusters)
    share = sum(x for _, x in clusters) / total
    binomial = share * (1 - share) * total
    squares = math.fsum((x - share * n) ** 2 for n, x in clusters)
    effect = max(1.0, m / (m - 1) * squares / binomial) if binomial else 1.0
    normal = NormalDist().inv_cdf(0.5 + confidence / 2)
    return effect * (student_t(confidence, degrees=m - 1) / normal) ** 2
