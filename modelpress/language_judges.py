"""How the gates of language models are judged: on the windows' own counts, with intervals computed here.

Tokens of one window are not independent of each other, so every interval is over windows, and none comes from fewer
than two.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence

from modelpress.clustered_intervals import Cluster, ClusteredShare, clustered_share
from modelpress.gate_results import Question, Sample, judge_sample, no_figure, unjudged
from modelpress.intervals import examples_needed
from modelpress.language_intervals import paired_ratio_interval, safe_exp
from modelpress.language_reports import LanguageReport
from modelpress.metrics import Interval
from modelpress.policies import Flips, Perplexity, Top1Agreement
from modelpress.reports import DriftReport, GateResult


def judge_perplexity(question: Question, gate: Perplexity, language: LanguageReport) -> GateResult:
    ratio, windows = language.perplexity_ratio.value, language.windows
    interval = paired_ratio_interval(windows, confidence=gate.confidence)
    if ratio is None:
        return no_figure(question)
    if interval is None:
        return unjudged(question, ratio, _too_few(len(windows)))
    if interval.high == math.inf:
        return unjudged(question, ratio, "its interval is too wide for a number: more windows of tokens may narrow it")
    tokens = sum(window.tokens for window in windows)
    interval_at = _narrowing(ratio, interval, tokens)

    def needed() -> int | None:
        return examples_needed(interval_at, bound=gate.max_ratio, seen=tokens)

    return judge_sample(question, Sample(ratio, interval, tokens, needed, "tokens", len(windows)))


def judge_top1(question: Question, gate: Top1Agreement, language: LanguageReport) -> GateResult:
    windows = [(window.tokens, window.agreements) for window in language.windows]
    agreed = clustered_share(windows, confidence=gate.confidence)
    apart = clustered_share([(n, n - agreements) for n, agreements in windows], confidence=gate.confidence)
    if agreed is None or apart is None:
        return unjudged(question, language.top1_agreement.value, _too_few(len(windows)))
    return judge_sample(question, _tokens(agreed, windows, lambda: _needed(apart, 1 - gate.min_share)))


def judge_token_flips(question: Question, gate: Flips, drift: DriftReport) -> GateResult:
    """Of a drift whose clusters are windows."""
    windows = [(cluster.n, cluster.flips) for cluster in drift.clusters]
    flipped = clustered_share(windows, confidence=gate.confidence)
    if flipped is None:
        return unjudged(question, drift.flip_share.value, _too_few(len(windows)))
    return judge_sample(question, _tokens(flipped, windows, lambda: _needed(flipped, gate.max_share)))


def _tokens(share: ClusteredShare, windows: Sequence[Cluster], needed: Callable[[], int | None]) -> Sample:
    return Sample(share.share, share.interval, share.n, needed, "tokens", len(windows))


def _needed(share: ClusteredShare, at_most: float) -> int | None:
    return examples_needed(share.interval_at, bound=at_most, seen=share.n)


def _narrowing(ratio: float, interval: Interval, seen: int) -> Callable[[int], Interval]:
    """The interval at another number of tokens: that of the logarithm narrows as 1 / sqrt(n)."""
    centre, start, stop = (math.log(max(x, sys.float_info.min)) for x in (ratio, interval.low, interval.high))

    def interval_at(n: int) -> Interval:
        width = math.sqrt(seen / n)
        low, high = (safe_exp(centre + width * (end - centre)) for end in (start, stop))
        return interval.model_copy(update={"low": low, "high": high})

    return interval_at


def _too_few(windows: int) -> str:
    seen = "1 window of tokens gives" if windows == 1 else f"{windows} windows of tokens give"
    return f"{seen} no interval: at least 2 are needed"
