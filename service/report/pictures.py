"""The report's pictures: figures in, SVG out. Every bar and dot is a figure of the report, none is computed anew."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from markupsafe import Markup

from modelpress.metrics import Footprint
from modelpress.reports import CurvePoint, GateResult, Histogram, LatencyRow, QualityReport
from service.report.svg import WIDTH, Axis, bar, join, line, picture, short, tag, text

MAX_NUMBERED_CLASSES = 12
LABEL_CHARACTERS = 14
MAX_TENSOR_KINDS = 12
PATTERN_CHARACTERS = 44
NEAR = 0.75
"""Values of which the smallest is more than this share of the largest are drawn without 0."""
BASELINE, CANDIDATE = "baseline", "candidate"


class Measured(NamedTuple):
    """One bar: whose, how long, and the figure to write behind `end`."""

    name: str
    value: float
    shown: str
    end: float


class TensorKind(NamedTuple):
    """Tensors whose names differ only in their numbers, and how far the merge moved each of them."""

    pattern: str
    changes: tuple[float, ...]


def gate_picture(gate: GateResult, scale: float) -> Markup:
    """Figure, interval and bound on one line; the allowed side of the bound is shaded. `scale`: 100 for percent."""
    figure, bound = gate.figure, gate.bound
    ends = [gate.interval.low, gate.interval.high] if gate.interval else []
    values = [value * scale for value in (bound, *ends, *([] if figure is None else [figure]))]
    axis = _strip_axis(values)
    at_bound = axis.at(bound * scale)
    allowed = (axis.start, at_bound) if gate.comparison == "<=" else (at_bound, axis.end)
    parts = [
        bar(axis.start, 6, axis.end - axis.start, 14, class_="track"),
        bar(allowed[0], 6, allowed[1] - allowed[0], 14, class_="allowed"),
        line((axis.at(0), 6), (axis.at(0), 20), class_="axis") if axis.low <= 0 else Markup(""),
        line((at_bound, 2), (at_bound, 24), class_="bound"),
    ]
    if gate.interval:
        low, high = (axis.at(end * scale) for end in ends)
        parts += [line((low, 13), (high, 13), class_="whisker")]
        parts += [line((end, 8), (end, 18), class_="whisker") for end in (low, high)]
    if figure is not None:
        parts.append(tag("circle", cx=axis.at(figure * scale), cy=13, r=5, class_=f"dot {gate.outcome.value.lower()}"))
    return picture(f"{gate.sentence}", 26, parts)


def _strip_axis(values: Sequence[float]) -> Axis:
    """From 0, or from below the lowest value, or near it where all lie close together; to beyond the highest."""
    low, high = min(values), max(values)
    if low > NEAR * high:
        margin = (high - low or high * (1 - NEAR)) * 0.5
        return Axis(low - margin, high + margin, 4, WIDTH - 4)
    low = min(0.0, low)
    margin = (high - low or 1) * 0.12
    return Axis(low - (margin if low < 0 else 0), high + margin, 4, WIDTH - 4)


def confusion_picture(quality: QualityReport, title: str) -> Markup:
    """Rows: true label; columns: predicted. Shade: share of the row; the right answers lie on the diagonal."""
    labels, size = quality.labels, len(quality.labels)
    left, top = 96.0, 58.0
    cell = min((WIDTH - left - 4) / size, 84.0)
    numbered = size <= MAX_NUMBERED_CLASSES
    parts = [text(left, 14, title, class_="heading"), text(left, 30, "predicted →", class_="note")]
    for i, row in enumerate(quality.confusion):
        total = sum(row) or 1
        y = top + i * cell
        if numbered:
            parts.append(text(left - 6, y + cell / 2 + 4, _cut(labels[i]), anchor="end"))
        for j, count in enumerate(row):
            parts.append(_cell(left + j * cell, y, cell, count / total, right=i == j))
            if numbered:
                parts.append(_count(left + (j + 0.5) * cell, y + cell / 2 + 5, count, count / total))
    if numbered and size <= 3:
        parts += [
            text(left + (j + 0.5) * cell, top - 4, _cut(label), anchor="middle") for j, label in enumerate(labels)
        ]
    right = sum(quality.confusion[i][i] for i in range(size))
    description = f"Confusion matrix of the {title}: {right} of {quality.accuracy.n} right."
    return picture(description, top + size * cell + 4, parts)


def _cell(x: float, y: float, size: float, share: float, *, right: bool) -> Markup:
    kind = "right" if right else "wrong"
    shown = bar(x + 1, y + 1, size - 2, size - 2, class_="cell")
    return join(
        [shown, tag("rect", x=x + 1, y=y + 1, width=size - 2, height=size - 2, class_=kind, fill_opacity=share)]
    )


def _count(x: float, y: float, count: int, share: float) -> Markup:
    return text(x, y, f"{count:,}", anchor="middle", class_="count light" if share > 0.55 else "count")


def size_picture(footprint: Footprint, bound: float | None) -> Markup:
    """Bytes of both models, and where the policy's bound lies."""
    axis = Axis(0, max(footprint.baseline_bytes, footprint.candidate_bytes), 84, WIDTH - 70)
    rows = ((BASELINE, footprint.baseline_bytes), (CANDIDATE, footprint.candidate_bytes))
    parts = []
    for i, (name, size) in enumerate(rows):
        parts += _row(axis, 8 + 34 * i, 28, Measured(name, size, f"{size / 1e6:,.1f} MB", axis.high))
    description = f"Size: baseline {rows[0][1] / 1e6:,.1f} MB, candidate {rows[1][1] / 1e6:,.1f} MB."
    if bound is not None:
        x = axis.at(bound * footprint.baseline_bytes)
        parts.append(line((x, 4), (x, 74), class_="bound"))
        parts.append(text(x, 88, f"bound {100 * bound:g} %", anchor="middle", class_="note"))
    return picture(description, 94 if bound is not None else 76, parts)


def latency_picture(rows: Sequence[LatencyRow]) -> Markup:
    """Median (bar) and 95th percentile (whisker) of each shape. Every shape has its own scale: its baseline's p95."""
    parts, y = [], 0.0
    for row in rows:
        axis = Axis(0, max(row.baseline_p95_ms, row.candidate_p95_ms), 84, WIDTH - 70)
        shape = f"batch {row.batch_size}, {row.sequence_length} tokens: {short(row.speedup)}x faster"
        parts.append(text(84, y + 14, shape, class_="heading"))
        pairs = (
            (BASELINE, row.baseline_median_ms, row.baseline_p95_ms),
            (CANDIDATE, row.candidate_median_ms, row.candidate_p95_ms),
        )
        for i, (name, median, p95) in enumerate(pairs):
            top = y + 20 + 26 * i
            parts += _row(axis, top, 20, Measured(name, median, f"{short(median)} ms", p95))
            parts += [
                line((axis.at(median), top + 10), (axis.at(p95), top + 10), class_="whisker"),
                line((axis.at(p95), top + 6), (axis.at(p95), top + 14), class_="whisker"),
            ]
        y += 82
    described = "; ".join(
        f"batch {r.batch_size}, {r.sequence_length} tokens: {short(r.baseline_median_ms)} against "
        f"{short(r.candidate_median_ms)} ms"
        for r in rows
    )
    return picture(f"Median latency of baseline against candidate. {described}.", y - 6, parts)


def _row(axis: Axis, y: float, height: float, measured: Measured) -> list[Markup]:
    """A horizontal bar with its name before it and its figure behind `end`."""
    return [
        text(axis.start - 8, y + height / 2 + 4, measured.name, anchor="end"),
        bar(axis.start, y, axis.at(measured.value) - axis.start, height, class_=measured.name),
        text(axis.at(measured.end) + 6, y + height / 2 + 4, measured.shown, class_="figure"),
    ]


def kl_picture(histogram: Histogram, counted: str = "answer") -> Markup:
    """How many answers, or tokens, moved how far. The horizontal axis is logarithmic: KL divergence in nats."""
    edges, counts = histogram.edges, histogram.counts
    across = Axis(edges[0], edges[-1], 40, WIDTH - 10)
    up = Axis(0, max(counts) or 1, 170, 12)
    parts = [
        bar(across.at(a) + 0.5, up.at(n), across.at(b) - across.at(a) - 1, 170 - up.at(n), class_=CANDIDATE)
        for a, b, n in zip(edges, edges[1:], counts, strict=False)
    ]
    powers = range(math.ceil(edges[0]), math.floor(edges[-1]) + 1)
    parts += _left_axis(up, (short(tick) for tick in up.ticks()))
    parts.append(line((40, 170), (WIDTH - 10, 170), class_="axis"))
    parts += [text(across.at(p), 186, power_text(p), anchor="middle") for p in powers if p % 2 == 0]
    parts.append(text(WIDTH / 2 + 15, 204, f"KL divergence of one {counted}, nats", anchor="middle", class_="note"))
    modal = counts.index(max(counts))
    description = (
        f"Histogram of the KL divergence of {sum(counts)} {counted}s; most lie near 10^{edges[modal]:.1f} nats."
    )
    return picture(description, 210, parts)


def change_picture(kinds: Sequence[TensorKind]) -> Markup:
    """How far a merge moved each tensor, a dot each: one line for a kind of tensor, the furthest first."""
    shown, rest = kinds[:MAX_TENSOR_KINDS], kinds[MAX_TENSOR_KINDS:]
    furthest = max(kinds[0].changes)
    axis = Axis(0, furthest, 8, WIDTH - 62)
    parts: list[Markup] = []
    for i, kind in enumerate(shown):
        y = 36.0 * i
        positions = sorted({round(2 * axis.at(change)) / 2 for change in kind.changes})
        parts.append(text(4, y + 12, f"{cut_front(kind.pattern)} × {len(kind.changes):,}"))
        parts.append(bar(4, y + 17, axis.end, 12, class_="track"))
        parts += [tag("circle", cx=x, cy=y + 23, r=4, class_="change") for x in positions]
        parts.append(text(axis.end + 10, y + 27, short(max(kind.changes)), class_="figure"))
    height = 36.0 * len(shown)
    if rest:
        parts.append(text(4, height + 14, f"and {len(rest):,} more kinds, {short(max(rest[0].changes))} at most"))
    description = f"Relative change of each tensor; {kinds[0].pattern} moved furthest, by {short(furthest)}."
    return picture(description, height + (22 if rest else 0), parts)


def curve_picture(curve: Sequence[CurvePoint], method: str) -> Markup:
    """Training loss (line) and held-out KL (dots), each on its own scale from 0."""
    losses = [(point.step, point.loss) for point in curve]
    looks = [(point.step, point.held_out["kl"]) for point in curve if "kl" in point.held_out]
    across = Axis(0, max(curve[-1].step, 1), 40, WIDTH - 44)
    up = Axis(0, max(loss for _, loss in losses) or 1, 150, 14)
    parts = [line((40, 150), (WIDTH - 44, 150), class_="axis"), *_left_axis(up, map(short, up.ticks()))]
    path = " ".join(f"{across.at(step):.1f},{up.at(loss):.1f}" for step, loss in losses)
    parts += [
        tag("polyline", points=path, class_="loss"),
        line((4, 5), (18, 5), class_="loss"),
        text(22, 9, "loss", class_="note"),
    ]
    if looks:
        down = Axis(0, max(kl for _, kl in looks) or 1, 150, 14)
        parts += [tag("circle", cx=across.at(s), cy=down.at(kl), r=3.5, class_="look") for s, kl in looks]
        parts += [text(WIDTH - 40, down.at(tick) + 4, short(tick)) for tick in down.ticks()]
        parts.append(text(WIDTH - 4, 9, "held-out KL, nats", anchor="end", class_="note"))
        parts.append(tag("circle", cx=WIDTH - 110, cy=5, r=3.5, class_="look"))
    parts += [text(across.at(tick), 166, short(tick), anchor="middle") for tick in across.ticks(5)]
    parts.append(text(WIDTH / 2, 182, "step", anchor="middle", class_="note"))
    ends = f"from {short(losses[0][1])} to {short(losses[-1][1])} in {curve[-1].step} steps"
    return picture(f"Loss of {method} {ends}.", 188, parts)


def _left_axis(axis: Axis, names: Iterable[str]) -> list[Markup]:
    start = 40.0
    shown = [text(start - 6, axis.at(t) + 4, name, anchor="end") for t, name in zip(axis.ticks(), names, strict=True)]
    return [line((start, axis.start), (start, axis.end), class_="axis"), *shown]


def power_text(exponent: int) -> str:
    """`10⁻³`."""
    digits = str(abs(exponent)).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return "1" if exponent == 0 else f"10{'⁻' if exponent < 0 else ''}{digits}"


def cut_front(pattern: str) -> str:
    return pattern if len(pattern) <= PATTERN_CHARACTERS else "…" + pattern[1 - PATTERN_CHARACTERS :]


def _cut(label: str) -> str:
    return label if len(label) <= LABEL_CHARACTERS else label[: LABEL_CHARACTERS - 1] + "…"
