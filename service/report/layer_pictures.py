"""The picture of a quantizing stage: the error of every linear layer's output, against that of rounding, by kind."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from markupsafe import Markup

from modelpress.quantization_reports import QuantizedLayer
from service.report.pictures import cut_front
from service.report.rows import name_pattern
from service.report.svg import WIDTH, Axis, bar, line, picture, short, tag, text

MAX_KINDS = 12
ROW = 34.0
TOP = 24.0
DECADE = (1, 2, 5)


class LayerKind(NamedTuple):
    """Linear layers whose names differ only in their numbers; every one of them has an error."""

    pattern: str
    layers: tuple[QuantizedLayer, ...]

    @property
    def worst(self) -> float:
        return max(layer.error or 0.0 for layer in self.layers)


def layer_kinds(layers: Iterable[QuantizedLayer]) -> list[LayerKind]:
    """Quantized layers with an error, by kind, the kind with the largest error first."""
    kinds: dict[str, list[QuantizedLayer]] = {}
    for layer in layers:
        if layer.error:
            kinds.setdefault(name_pattern(layer.name), []).append(layer)
    found = [LayerKind(pattern, tuple(members)) for pattern, members in kinds.items()]
    return sorted(found, key=lambda kind: (-kind.worst, kind.pattern))


def stage_picture(layers: Iterable[QuantizedLayer]) -> Markup:
    """Empty where no layer has an error."""
    kinds = layer_kinds(layers)
    return layer_picture(kinds) if kinds else Markup("")


def layer_picture(kinds: Sequence[LayerKind]) -> Markup:
    """A line for each kind of layer: rings where rounding lies, dots where the stage lies, a square for a fallback."""
    shown, rest = kinds[:MAX_KINDS], kinds[MAX_KINDS:]
    axis = _error_axis(shown)
    parts = list(_legend())
    for i, kind in enumerate(shown):
        parts += _kind_row(kind, axis, TOP + ROW * i)
    bottom = TOP + ROW * len(shown)
    parts += _decades(axis, bottom)
    parts.append(
        text(WIDTH / 2, bottom + 30, "error of the layer's output, share of its norm", anchor="middle", class_="note")
    )
    if rest:
        more = f"and {len(rest):,} more kinds, {short(rest[0].worst)} at most"
        parts.append(text(4, bottom + 48, more))
    count = sum(len(kind.layers) for kind in kinds)
    description = (
        f"Output error of {count:,} linear layers by kind on a logarithmic axis; {kinds[0].pattern} has the largest, "
        f"{short(kinds[0].worst)}."
    )
    return picture(description, bottom + (54 if rest else 36), parts)


def _error_axis(kinds: Sequence[LayerKind]) -> Axis:
    """Of log10(error), from a little below the smallest to a little above the largest."""
    figures = [e for kind in kinds for layer in kind.layers for e in (layer.error, layer.rounding_error) if e]
    return Axis(math.log10(min(figures)) - 0.05, math.log10(max(figures)) + 0.05, 8, WIDTH - 8)


def _legend() -> Iterator[Markup]:
    marks = (
        (8, "dot", "after the stage"),
        (118, "ring", "rounding to nearest"),
        (252, "fallback", "fell back"),
    )
    for x, class_, meaning in marks:
        yield _mark(x, 7, class_)
        yield text(x + 9, 11, meaning, class_="note")


def _kind_row(kind: LayerKind, axis: Axis, top: float) -> Iterator[Markup]:
    y = top + 22
    yield text(4, top + 12, f"{cut_front(kind.pattern)} × {len(kind.layers):,}")
    yield bar(4, y - 5, WIDTH - 8, 10, class_="track")
    drawn = {
        "ring": [layer.rounding_error for layer in kind.layers],
        "dot": [layer.error for layer in kind.layers if not layer.fallback],
        "fallback": [layer.error for layer in kind.layers if layer.fallback],
    }
    for class_, figures in drawn.items():
        for x in sorted({round(2 * axis.at(math.log10(figure))) / 2 for figure in figures if figure}):
            yield _mark(x, y, class_)


def _mark(x: float, y: float, class_: str) -> Markup:
    if class_ == "fallback":
        return tag("rect", x=x - 3.5, y=y - 3.5, width=7, height=7, class_="fallback")
    return tag("circle", cx=x, cy=y, r=3.5, class_="ring" if class_ == "ring" else "change")


def _decades(axis: Axis, y: float) -> Iterator[Markup]:
    """Round errors along the axis: 0.01, 0.02, 0.05, 0.1."""
    yield line((axis.start, y), (axis.end, y), class_="axis")
    for power in range(math.floor(axis.low), math.ceil(axis.high) + 1):
        for factor in DECADE:
            place = power + math.log10(factor)
            if axis.low <= place <= axis.high:
                yield line((axis.at(place), y), (axis.at(place), y + 4), class_="axis")
                yield text(axis.at(place), y + 16, short(factor * 10.0**power), anchor="middle")
