"""What the report page says in figures: rows of text made from the report's values, ready to be laid out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from modelpress.gate_results import WORDINGS
from modelpress.metrics import Footprint, Interval, Metric
from modelpress.policies import Policy
from modelpress.reports import EvaluationReport, GateResult, LatencyRow, StageRecord
from service.report.pictures import gate_picture
from service.report.svg import short

NO_GATE = "none"
TITLES = {
    "flips": "Flips",
    "kl_mean": "KL, mean",
    "kl_p99": "KL, 99th percentile",
    "parity": "Parity",
    "perplexity": "Perplexity ratio",
    "top1_agreement": "Top-1 agreement",
    "merge_difference": "Layer difference",
    "merge_logits": "Logit difference",
    "merge_change": "Largest change",
}
"""Where the gate's title in a sentence is too long for a table."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class KeyFigure:
    """One of the few figures that matter. `outcome` is its gate's, `none` where the policy has no such gate."""

    title: str
    value: str
    details: tuple[str, ...]
    outcome: str


@dataclass(frozen=True)
class GateRow:
    title: str
    figure: str
    interval: str
    bound: str
    outcome: str
    sentence: str
    picture: Markup


@dataclass(frozen=True)
class Comparison:
    """Baseline against candidate, and what changed."""

    name: str
    baseline: str
    candidate: str
    change: str


def key_figures(evaluation: EvaluationReport, gates: Sequence[GateResult], policy: Policy) -> tuple[KeyFigure, ...]:
    judged = outcomes(gates)
    drop, row = evaluation.accuracy_drop, speed_row(evaluation.latency, policy)
    speed = (
        f"batch {row.batch_size}, {row.sequence_length} tokens, {threads(row.threads)}",
        f"{short(row.baseline_median_ms)} → {short(row.candidate_median_ms)} ms",
    )
    accuracy = (
        stated(drop.interval, 100),
        f"{percent(evaluation.baseline.accuracy.value)} → {percent(evaluation.candidate.accuracy.value)}, "
        f"n = {evaluation.paired.n:,}",
    )
    return (
        size_figure(evaluation.footprint, judged),
        KeyFigure("Speed-up", f"{short(row.speedup)}x", speed, judged.get("speed", NO_GATE)),
        KeyFigure(
            "Accuracy drop",
            "not computed" if drop.value is None else f"{short(100 * drop.value)} points",
            accuracy,
            judged.get("accuracy_drop", NO_GATE),
        ),
    )


def size_figure(footprint: Footprint, judged: Mapping[str, str]) -> KeyFigure:
    details = (
        "of the baseline's bytes",
        f"{size_text(footprint.baseline_bytes)} → {size_text(footprint.candidate_bytes)}",
    )
    return KeyFigure("Size", f"{short(100 * footprint.ratio)} %", details, judged.get("size", NO_GATE))


def outcomes(gates: Sequence[GateResult]) -> dict[str, str]:
    """By gate, as the style sheet calls them."""
    return {gate.name: gate.outcome.value.lower() for gate in gates}


def speed_row(rows: Sequence[LatencyRow], policy: Policy) -> LatencyRow:
    """The shape that the policy's speed gate names; the first one measured where it names none."""
    gate = policy.gates.speed
    shape = (gate.batch_size, gate.sequence_length) if gate else None
    return next((row for row in rows if (row.batch_size, row.sequence_length) == shape), rows[0])


def gate_rows(gates: Sequence[GateResult]) -> tuple[GateRow, ...]:
    return tuple(_gate_row(gate) for gate in gates)


def comparisons(evaluation: EvaluationReport) -> Iterator[Comparison]:
    """The before-and-after table. Quality is of the exported files in their runtime."""
    baseline, candidate = evaluation.baseline, evaluation.candidate
    yield quality("Accuracy", baseline.accuracy, candidate.accuracy)
    yield quality("F1, macro average", baseline.f1_macro, candidate.f1_macro)
    for before, after in zip(baseline.per_class, candidate.per_class, strict=True):
        change = _points(before.f1, after.f1)
        yield Comparison(f"F1 of {before.label}, n = {before.support:,}", percent(before.f1), percent(after.f1), change)
    yield from footprint_rows(evaluation.footprint)
    for row in evaluation.latency:
        yield Comparison(
            f"Latency, batch {row.batch_size}, {row.sequence_length} tokens: median (p95)",
            f"{short(row.baseline_median_ms)} ({short(row.baseline_p95_ms)}) ms",
            f"{short(row.candidate_median_ms)} ({short(row.candidate_p95_ms)}) ms",
            f"{short(row.speedup)}x ({' to '.join(interval_ends(row.speedup_interval, 1))})",
        )


def footprint_rows(footprint: Footprint) -> Iterator[Comparison]:
    yield Comparison(
        "Size of the model files",
        size_text(footprint.baseline_bytes),
        size_text(footprint.candidate_bytes),
        f"{percent(footprint.ratio)} of it",
    )
    weights = (footprint.baseline_parameters, footprint.candidate_parameters)
    share = f"{percent(weights[1] / weights[0])} of them" if weights[0] else "–"
    yield Comparison("Parameters", f"{weights[0]:,}", f"{weights[1]:,}", share)


def quality(name: str, before: Metric, after: Metric) -> Comparison:
    """A share of right answers, with its interval in brackets where it has one."""

    def shown(metric: Metric) -> str:
        ends = metric.interval
        return (
            f"{percent(metric.value)} ({100 * ends.low:.2f} to {100 * ends.high:.2f})"
            if ends
            else percent(metric.value)
        )

    return Comparison(name, shown(before), shown(after), _points(before.value, after.value))


def stage_figures(stage: StageRecord) -> list[tuple[str, str, str]]:
    """Name, before, after: what the stage did to the held-out split."""
    names = list(dict.fromkeys([*stage.before, *stage.after]))
    return [(name, _held_out(stage.before, name), _held_out(stage.after, name)) for name in names]


def touched_groups(names: Sequence[str]) -> list[tuple[str, int]]:
    """Names that differ only in their numbers, as one pattern with its count, in order of appearance."""
    return list(Counter(map(name_pattern, names)).items())


def name_pattern(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` as `model.layers.*.mlp.up_proj.weight`."""
    return _NUMBER.sub("*", name)


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.2f}\N{NO-BREAK SPACE}%"


def size_text(size: float) -> str:
    """Decimal megabytes; from a thousand of them, gigabytes."""
    if size >= 1e9:
        return f"{size / 1e9:,.2f}\N{NO-BREAK SPACE}GB"
    return f"{size / 1e6:,.1f}\N{NO-BREAK SPACE}MB"


def threads(count: int) -> str:
    return "one thread" if count == 1 else f"{count} threads"


def stated(interval: Interval | None, scale: float, significant: int = 3) -> str:
    low, high = interval_ends(interval, scale, significant)
    return f"{100 * interval.confidence:g} % interval {low} to {high}" if interval else "no interval"


def interval_ends(interval: Interval | None, scale: float, significant: int = 3) -> tuple[str, str]:
    if interval is None:
        return "", ""
    return short(interval.low * scale, significant), short(interval.high * scale, significant)


def _gate_row(gate: GateResult) -> GateRow:
    wording = WORDINGS[gate.name]
    suffix = wording.suffix.partition(" of ")[0]
    low, high = interval_ends(gate.interval, wording.scale, wording.digits)
    side = "at most" if gate.comparison == "<=" else "at least"
    return GateRow(
        title=TITLES.get(gate.name, wording.title),
        figure="none" if gate.figure is None else f"{short(gate.figure * wording.scale, wording.digits)}{suffix}",
        interval=f"{low} to {high}" if gate.interval else "–",
        bound=f"{side} {short(gate.bound * wording.scale, wording.digits)}{suffix}",
        outcome=gate.outcome.value,
        sentence=gate.sentence,
        picture=gate_picture(gate, wording.scale),
    )


def _points(before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return "–"
    return f"{100 * (after - before):+.2f} points".replace("-", "−")


def _held_out(figures: dict[str, float], name: str) -> str:
    if name not in figures:
        return "–"
    return percent(figures[name]) if name in ("accuracy", "f1_macro") else short(figures[name])
