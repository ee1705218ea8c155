"""What the report page says of a language model: key figures, before and after, continuations side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from modelpress.gate_results import WORDINGS
from modelpress.language_reports import Generation, LanguageReport
from modelpress.metrics import Metric
from modelpress.reports import DriftReport, GateResult
from service.report.rows import (
    NO_GATE,
    Comparison,
    KeyFigure,
    footprint_rows,
    interval_ends,
    outcomes,
    percent,
    quality,
    size_figure,
    stated,
)
from service.report.svg import short

PROMPT_CHARACTERS = 600
RATIO_DIGITS = WORDINGS["perplexity"].digits
NOT_COMPUTED = "not computed"


@dataclass(frozen=True)
class Continuation:
    """One prompt and both continuations, each in two parts: what they share from the start, and the rest."""

    prompt: str
    shared: str
    baseline: str
    candidate: str
    equal: str


def key_figures(language: LanguageReport, drift: DriftReport, gates: Sequence[GateResult]) -> tuple[KeyFigure, ...]:
    judged = outcomes(gates)
    ratio, agreement = language.perplexity_ratio, language.top1_agreement
    perplexities = (language.baseline_perplexity, language.candidate_perplexity)
    return (
        size_figure(language.footprint, judged),
        KeyFigure(
            "Perplexity",
            _times(ratio),
            (stated(ratio.interval, 1, RATIO_DIGITS), " → ".join(map(_shown, perplexities)) + f", {_tokens(ratio)}"),
            judged.get("perplexity", NO_GATE),
        ),
        KeyFigure(
            "Token KL, mean",
            _shown(drift.kl_mean, " nats"),
            (f"99th percentile {_shown(drift.kl_p99, ' nats')}", f"{_tokens(drift.kl_mean)} of the probes"),
            judged.get("kl_mean", NO_GATE),
        ),
        KeyFigure(
            "Top-1 agreement",
            percent(agreement.value),
            ("of the tokens have the same most likely one", _tokens(agreement)),
            judged.get("top1_agreement", NO_GATE),
        ),
    )


def comparisons(language: LanguageReport) -> Iterator[Comparison]:
    """The before-and-after table."""
    ratio = language.perplexity_ratio
    low, high = interval_ends(ratio.interval, 1, RATIO_DIGITS)
    yield Comparison(
        "Perplexity",
        _with_interval(language.baseline_perplexity),
        _with_interval(language.candidate_perplexity),
        f"{_times(ratio)} ({low} to {high})" if ratio.interval else _times(ratio),
    )
    if language.choices:
        choices = language.choices
        name = f"Accuracy on {choices.paired.n:,} questions"
        yield quality(name, choices.baseline_accuracy, choices.candidate_accuracy)
    yield from footprint_rows(language.footprint)


def continuations(generations: Sequence[Generation]) -> list[Continuation]:
    return [_continuation(generation) for generation in generations]


def visible(token: str) -> str:
    """A token's text with its line breaks and tabs written out; other characters as they are."""
    return token.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")


def _continuation(generation: Generation) -> Continuation:
    pairs = zip(generation.baseline, generation.candidate, strict=False)
    shared = "".join(one for one, other in takewhile(lambda pair: pair[0] == pair[1], pairs))
    prompt = generation.prompt
    return Continuation(
        prompt=prompt if len(prompt) <= PROMPT_CHARACTERS else "…" + prompt[1 - PROMPT_CHARACTERS :],
        shared=shared,
        baseline=generation.baseline[len(shared) :],
        candidate=generation.candidate[len(shared) :],
        equal=f"{generation.equal_tokens} of {generation.tokens} tokens equal",
    )


def _shown(metric: Metric, unit: str = "") -> str:
    return NOT_COMPUTED if metric.value is None else f"{short(metric.value)}{unit}"


def _times(ratio: Metric) -> str:
    return NOT_COMPUTED if ratio.value is None else f"{short(ratio.value, RATIO_DIGITS)}x"


def _with_interval(metric: Metric) -> str:
    low, high = interval_ends(metric.interval, 1)
    return f"{_shown(metric)} ({low} to {high})" if metric.interval else _shown(metric)


def _tokens(metric: Metric) -> str:
    return f"{metric.n:,} tokens"
