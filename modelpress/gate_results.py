"""One gate's question, outcome and sentence: what is common to every gate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from modelpress.metrics import Interval
from modelpress.reports import GateResult, Outcome


@dataclass(frozen=True)
class Question:
    """Is the figure of gate `name` at most, or at least, `bound`?"""

    name: str
    bound: float
    unit: str
    comparison: Literal["<=", ">="] = "<="


@dataclass(frozen=True)
class Sample:
    """A figure that another sample, or another run, would give differently. `n` counts `counted`.

    `needed` computes how many examples would tell where the interval holds the bound; None where none would.
    """

    figure: float
    interval: Interval
    n: int
    needed: Callable[[], int | None]
    counted: str = "examples"
    windows: int | None = None
    """Where tokens are counted: the windows that they stand in."""

    @property
    def basis(self) -> str:
        """E.g. `2,101 examples`, `8,176 tokens in 16 windows`."""
        return f"{self.n:,} {self.counted}" + (f" in {self.windows:,} windows" if self.windows else "")


class Wording(NamedTuple):
    """How a gate's figure is written: `scale` times the figure with so many significant digits, then `suffix`."""

    title: str
    scale: float
    suffix: str
    digits: int = 3


WORDINGS: Mapping[str, Wording] = {
    "accuracy_drop": Wording("Accuracy drop", 100, " points"),
    "flips": Wording("Share of changed predictions", 100, " %"),
    "kl_mean": Wording("Mean KL divergence", 1, " nats"),
    "kl_p99": Wording("99th percentile of the KL divergence", 1, " nats"),
    "size": Wording("Size", 100, " % of the baseline's bytes"),
    "speed": Wording("Speed-up", 1, "x"),
    "parity": Wording("Largest logit difference between torch and the runtime", 1, ""),
    "perplexity": Wording("Perplexity over the baseline's", 1, "", digits=4),
    "top1_agreement": Wording("Share of equal most likely tokens", 100, " %"),
    "merge_difference": Wording("Largest output difference of a merged layer", 1, " of the output's norm"),
    "merge_logits": Wording("Largest logit difference of the merged model", 1, " of the largest logit"),
    "merge_change": Wording("Largest change of a tensor", 1, " of its norm"),
}
ALL_DIGITS = 9


def judge_figure(question: Question, figure: float | None, basis: str = "") -> GateResult:
    """Judge an exact figure against the bound; one that is missing or not finite is never passed.

    `basis` says in a few words where the figure comes from.
    """
    if figure is None or not math.isfinite(figure):
        return no_figure(question)
    met = figure <= question.bound if question.comparison == "<=" else figure >= question.bound
    outcome = Outcome.PASSED if met else Outcome.FAILED
    return _result(question, outcome, figure, f"{_claim(question, figure, basis)}: {outcome.name.lower()}.")


def judge_sample(question: Question, sample: Sample | None) -> GateResult:
    """Judge a sampled figure: passed, or failed, only where its whole interval lies on one side of the bound."""
    if sample is None or not all(map(math.isfinite, (sample.figure, sample.interval.low, sample.interval.high))):
        return no_figure(question)
    outcome = _outcome(question, sample.interval)
    needed = sample.needed() if outcome is Outcome.INCONCLUSIVE else None
    claim = _claim(question, sample.figure, _drawn(question, sample))
    sentence = f"{claim}: {_because(outcome, sample, needed)}."
    result = _result(question, outcome, sample.figure, sentence)
    return result.model_copy(update={"interval": sample.interval, "examples_needed": needed})


def no_figure(question: Question) -> GateResult:
    return unjudged(question, None, "there is nothing that it could be computed from")


def unjudged(question: Question, figure: float | None, why: str) -> GateResult:
    """A gate that cannot be judged is inconclusive, whatever its figure."""
    return _result(question, Outcome.INCONCLUSIVE, figure, f"{WORDINGS[question.name].title} cannot be judged: {why}.")


def _outcome(question: Question, interval: Interval) -> Outcome:
    if question.comparison == "<=":
        passed, failed = interval.high <= question.bound, interval.low > question.bound
    else:
        passed, failed = interval.low >= question.bound, interval.high < question.bound
    return Outcome.PASSED if passed else Outcome.FAILED if failed else Outcome.INCONCLUSIVE


def _because(outcome: Outcome, sample: Sample, needed: int | None) -> str:
    if outcome is not Outcome.INCONCLUSIVE:
        return outcome.name.lower()
    cure = f"about {needed:,} would at the rates seen" if needed else "more of them may"
    return f"the interval holds the bound, so {sample.basis} cannot tell; {cure}"


def _claim(question: Question, figure: float, basis: str) -> str:
    """E.g. `Accuracy drop is 0.381 points (95 % interval -0.14 to 0.91, 2,101 examples), at most 1 points allowed`."""
    wording, digits = WORDINGS[question.name], _digits(question, figure)
    limit = "at most" if question.comparison == "<=" else "at least"
    verb = "allowed" if question.comparison == "<=" else "required"
    shown, bound = (_number(wording, value, digits) + wording.suffix for value in (figure, question.bound))
    return f"{wording.title} is {shown}{f' ({basis})' if basis else ''}, {limit} {bound} {verb}"


def _drawn(question: Question, sample: Sample) -> str:
    """E.g. `95 % interval -0.14 to 0.91, 2,101 examples`."""
    wording, digits = WORDINGS[question.name], _digits(question, sample.figure)
    low, high = (_number(wording, end, digits) for end in (sample.interval.low, sample.interval.high))
    return f"{100 * sample.interval.confidence:.3g} % interval {low} to {high}, {sample.basis}"


def _digits(question: Question, figure: float) -> int:
    """Few, except where the figure would look like its bound."""
    wording = WORDINGS[question.name]
    alike = _number(wording, figure, wording.digits) == _number(wording, question.bound, wording.digits)
    return ALL_DIGITS if alike else wording.digits


def _number(wording: Wording, value: float, digits: int) -> str:
    return f"{wording.scale * value:.{digits}g}"


def _result(question: Question, outcome: Outcome, figure: float | None, sentence: str) -> GateResult:
    return GateResult(
        name=question.name,
        outcome=outcome,
        figure=figure,
        bound=question.bound,
        comparison=question.comparison,
        unit=question.unit,
        sentence=sentence,
    )
