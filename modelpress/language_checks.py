"""Whether the figures of a language model agree with the sums of its windows, its counts and its drift."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from modelpress.clustered_intervals import clustered_share
from modelpress.contradictions import require, require_value
from modelpress.language_intervals import exponential, mean_per_token_interval, paired_ratio_interval, safe_exp
from modelpress.language_reports import ChoiceReport, Generation, LanguageReport, TokenWindow
from modelpress.metrics import Interval, PairedCounts
from modelpress.reports import DriftReport

TOLERANCE = 1e-9
"""Of figures made from sums: another order of additions, another library's exp."""
ROUNDING_NATS = 1e-4
"""What a sum that cannot be negative may be below 0, per token."""


def check_language(language: LanguageReport, drift: DriftReport) -> None:
    """Raise VerificationFailed naming the first figure that its windows or counts contradict."""
    require(1 <= language.stride <= language.window, f"language.stride is {language.stride} of {language.window}")
    for index, window in enumerate(language.windows):
        _check_window(f"language.windows[{index}]", window, language.window)
    _check_figures(language)
    if language.choices is not None:
        _check_choices(language.choices)
    for generation in language.generations:
        _check_generation(generation)
    _check_drift(language, drift)


def check_paired(paired: PairedCounts) -> None:
    require(min(paired.model_dump().values()) >= 0, "the paired counts hold a negative number")


def _check_window(name: str, window: TokenWindow, length: int) -> None:
    require(1 <= window.tokens <= length, f"{name} predicts {window.tokens} tokens of {length}")
    agreements = f"{window.agreements} agreements of {window.tokens}"
    require(0 <= window.agreements <= window.tokens, f"{name} counts {agreements}")
    for field in ("baseline_nats", "candidate_nats", "kl_nats"):
        value = getattr(window, field)
        require(-ROUNDING_NATS * window.tokens <= value < math.inf, f"{name}.{field} is {value}")


def _check_figures(language: LanguageReport) -> None:
    tokens = sum(window.tokens for window in language.windows)
    for name, value in _figures(language.windows, tokens).items():
        metric = getattr(language, name)
        require(metric.n == tokens, f"language.{name} comes from {metric.n} tokens, its windows have {tokens}")
        require_value(f"language.{name}", metric, value, tolerance=TOLERANCE)
        if metric.interval is not None:
            computed = _interval(name, language.windows, metric.interval.confidence)
            _check_interval(f"language.{name}", metric.interval, computed)


def _figures(windows: tuple[TokenWindow, ...], tokens: int) -> Mapping[str, float | None]:
    """By field of the report; None where there are no tokens, or where a float cannot hold it."""
    names = ("baseline_perplexity", "candidate_perplexity", "perplexity_ratio", "token_kl", "top1_agreement")
    if not tokens:
        return dict.fromkeys(names)
    baseline, candidate, kl = (
        math.fsum(getattr(window, f"{part}_nats") for window in windows) for part in ("baseline", "candidate", "kl")
    )
    exponents = (baseline, candidate, candidate - baseline)
    agreements = sum(window.agreements for window in windows)
    values = (*(safe_exp(nats / tokens) for nats in exponents), kl / tokens, agreements / tokens)
    return {name: value if value < math.inf else None for name, value in zip(names, values, strict=True)}


def _interval(name: str, windows: Sequence[TokenWindow], confidence: float) -> Interval | None:
    """That of a figure of the report, from its windows."""
    if name == "perplexity_ratio":
        return paired_ratio_interval(windows, confidence=confidence)
    if name == "top1_agreement":
        agreements = [(window.tokens, window.agreements) for window in windows]
        share = clustered_share(agreements, confidence=confidence)
        return None if share is None else share.interval
    field = "kl_nats" if name == "token_kl" else f"{name.removesuffix('_perplexity')}_nats"
    sums = [getattr(window, field) for window in windows]
    interval = mean_per_token_interval(sums, [window.tokens for window in windows], confidence=confidence)
    if interval is None or name != "token_kl":
        return interval and exponential(interval)
    return interval.model_copy(update={"low": max(0.0, interval.low)})


def _check_interval(name: str, given: Interval, computed: Interval | None) -> None:
    require(computed is not None, f"{name} has an interval that comes from fewer than 2 windows")
    if computed is not None:
        same = all(
            math.isclose(one, other, rel_tol=1e-6, abs_tol=TOLERANCE)
            for one, other in ((given.low, computed.low), (given.high, computed.high))
        )
        ends = f"{given.low} to {given.high}"
        require(same, f"{name} has the interval {ends}, its windows give {computed.low} to {computed.high}")


def _check_choices(choices: ChoiceReport) -> None:
    paired = choices.paired
    check_paired(paired)
    require(paired.n > 0, "language.choices comes from 0 questions")
    right = {"baseline": paired.only_baseline_right, "candidate": paired.only_candidate_right}
    for role, only in right.items():
        accuracy = getattr(choices, f"{role}_accuracy")
        require_value(f"language.choices.{role}_accuracy", accuracy, (paired.both_right + only) / paired.n)
    require_value("language.choices.accuracy_drop", choices.accuracy_drop, paired.accuracy_drop)


def _check_generation(generation: Generation) -> None:
    name = f"the generation of row {generation.index}"
    equal, tokens = generation.equal_tokens, generation.tokens
    require(0 <= equal <= tokens, f"{name} has {equal} equal tokens of {tokens}")
    same = equal < tokens or generation.baseline == generation.candidate
    require(same, f"{name} has {equal} equal tokens of {tokens}, and two texts that differ")


def _check_drift(language: LanguageReport, drift: DriftReport) -> None:
    """A language model's drift counts tokens in windows; on the evaluation texts they are the same tokens."""
    require(bool(drift.clusters) or not drift.n, "drift does not say which windows its tokens stand in")
    if drift.probes == language.dataset:
        seen = [(window.tokens, window.tokens - window.agreements) for window in language.windows]
        counted = [(cluster.n, cluster.flips) for cluster in drift.clusters]
        require(counted == seen, "drift and language count different tokens of the same dataset")
        require_value("kl_mean", drift.kl_mean, language.token_kl.value, tolerance=TOLERANCE)
