"""Language models: what is measured of two of them on the same tokens, from the stored figures.

Every measurement of this task has one VERSION; this module names them all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.choices import answer_questions
from evaluators.generations import generate
from evaluators.token_comparison import ComparedModels, compare_tokens
from evaluators.token_drift import measure_token_drift
from evaluators.token_figures import TokenFigures, load_token_figures
from evaluators.weight_footprint import measure_weight_footprint
from modelpress.clustered_intervals import clustered_share
from modelpress.language_intervals import exponential, mean_per_token_interval, paired_ratio_interval, safe_exp
from modelpress.language_reports import TokenWindow
from modelpress.metrics import Interval, Metric

__all__ = [
    "VERSION",
    "ComparedModels",
    "answer_questions",
    "compare_tokens",
    "generate",
    "load_token_figures",
    "measure_language",
    "measure_token_drift",
    "measure_weight_footprint",
]

VERSION = 1
"""Raised whenever any figure of a language model may change: part of their cache keys."""


def measure_language(figures: TokenFigures, *, dataset: str, confidence: float) -> dict[str, Any]:
    """The fields of LanguageReport that come from the tokens, as JSON; `dataset` is the digest of the texts.

    Perplexity is exp of the mean nats per token. Intervals are over the windows: none where there is only one.
    """
    windows = token_windows(figures)
    parts = {
        "baseline_perplexity": _perplexity("baseline_perplexity", windows, "baseline_nats", confidence),
        "candidate_perplexity": _perplexity("candidate_perplexity", windows, "candidate_nats", confidence),
        "perplexity_ratio": _ratio(windows, confidence),
        "token_kl": _token_kl(windows, confidence),
        "top1_agreement": _agreement(windows, confidence),
    }
    return {
        "dataset": dataset,
        "baseline_runtime": figures.facts.baseline_runtime,
        "candidate_runtime": figures.facts.candidate_runtime,
        "window": figures.facts.window,
        "stride": figures.facts.stride,
        **{name: metric.model_dump(mode="json") for name, metric in parts.items()},
        "windows": [window.model_dump(mode="json") for window in windows],
        "warnings": _warnings(windows, parts),
    }


def token_windows(figures: TokenFigures) -> tuple[TokenWindow, ...]:
    """The sums of each window, exactly rounded: from them everything else is computed, here and by who checks it."""
    tokens, agreements = figures.window_tokens, np.add.reduceat(figures.agree.astype(np.int64), figures.starts)
    baseline, candidate, kl = (
        window_sums(values, figures) for values in (figures.baseline_nats, figures.candidate_nats, figures.kl)
    )
    rows = zip(tokens.tolist(), baseline, candidate, kl, agreements.tolist(), strict=True)
    return tuple(TokenWindow(**dict(zip(TokenWindow.model_fields, row, strict=True))) for row in rows)


def window_sums(values_N: NDArray[np.float64], figures: TokenFigures) -> list[float]:
    return [math.fsum(part.tolist()) for part in np.split(values_N, figures.starts[1:])]


def _total(windows: Sequence[TokenWindow], field: str) -> float:
    return math.fsum(getattr(window, field) for window in windows)


def _tokens(windows: Sequence[TokenWindow]) -> int:
    return sum(window.tokens for window in windows)


def _interval(windows: Sequence[TokenWindow], field: str, confidence: float) -> Interval | None:
    sums = [getattr(window, field) for window in windows]
    return mean_per_token_interval(sums, [window.tokens for window in windows], confidence=confidence)


def _perplexity(name: str, windows: Sequence[TokenWindow], field: str, confidence: float) -> Metric:
    interval = _interval(windows, field, confidence)
    tokens = _tokens(windows)
    value = safe_exp(_total(windows, field) / tokens)
    return _finite(name, value, None if interval is None else exponential(interval), tokens)


def _ratio(windows: Sequence[TokenWindow], confidence: float) -> Metric:
    tokens = _tokens(windows)
    value = safe_exp((_total(windows, "candidate_nats") - _total(windows, "baseline_nats")) / tokens)
    return _finite("perplexity_ratio", value, paired_ratio_interval(windows, confidence=confidence), tokens)


def _finite(name: str, value: float, interval: Interval | None, tokens: int) -> Metric:
    """A ratio that a float may be too small for: then there is no figure, or no interval."""
    if interval is not None and interval.high == math.inf:
        interval = None
    return Metric(name=name, value=value if value < math.inf else None, unit="ratio", n=tokens, interval=interval)


def _token_kl(windows: Sequence[TokenWindow], confidence: float) -> Metric:
    interval = _interval(windows, "kl_nats", confidence)
    if interval is not None:
        interval = interval.model_copy(update={"low": max(0.0, interval.low)})
    tokens = _tokens(windows)
    return Metric(name="token_kl", value=_total(windows, "kl_nats") / tokens, unit="nats", n=tokens, interval=interval)


def _agreement(windows: Sequence[TokenWindow], confidence: float) -> Metric:
    share = clustered_share([(window.tokens, window.agreements) for window in windows], confidence=confidence)
    tokens, agreements = _tokens(windows), sum(window.agreements for window in windows)
    return Metric(
        name="top1_agreement",
        value=agreements / tokens,
        unit="fraction",
        n=tokens,
        interval=share.interval if share else None,
    )


def _warnings(windows: Sequence[TokenWindow], parts: Mapping[str, Metric]) -> list[str]:
    warnings = []
    if len(windows) < 2:
        warnings.append("the evaluation texts fill one window only: no figure has an interval")
    warnings += [f"{name} is too large for a number" for name, metric in parts.items() if metric.value is None]
    return warnings
