"""Just enough SVG for the report's pictures: escaped elements, an axis with round ticks. Same input, same bytes.

Text stays text (searchable, readable aloud), colours come from the page's style sheet through classes, and nothing is
loaded: no fonts, no scripts. Lengths are in user units; a picture is `WIDTH` wide and scales with the page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH = 360


def tag(name: str, content: str | Markup = "", **attributes: str | float) -> Markup:
    """One element. `class_` becomes `class`, `text_anchor` becomes `text-anchor`; numbers keep two decimals."""
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"' for key, value in attributes.items())
    return Markup(f"<{name}{given}>{escape(content)}</{name}>")  # noqa: S704 - every part is escaped


def join(parts: Iterable[Markup]) -> Markup:
    return Markup("").join(parts)


def picture(description: str, height: float, parts: Iterable[Markup]) -> Markup:
    """A picture with its text alternative."""
    box = f"0 0 {WIDTH} {height:.0f}"
    return tag("svg", join(parts), class_="picture", viewBox=box, role="img", aria_label=description)


def text(x: float, y: float, content: str, *, anchor: str = "start", class_: str = "label") -> Markup:
    return tag("text", content, x=x, y=y, text_anchor=anchor, class_=class_)


def line(start: tuple[float, float], end: tuple[float, float], *, class_: str) -> Markup:
    return tag("line", x1=start[0], y1=start[1], x2=end[0], y2=end[1], class_=class_)


def bar(x: float, y: float, width: float, height: float, *, class_: str) -> Markup:
    return tag("rect", x=x, y=y, width=max(width, 0), height=max(height, 0), class_=class_)


@dataclass(frozen=True)
class Axis:
    """Maps values in [low, high] to positions from `start` to `end`, which may run downwards."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Values outside [low, high] land on the nearer end."""
        share = (min(max(value, self.low), self.high) - self.low) / ((self.high - self.low) or 1)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 4) -> list[float]:
        """About `count` round values inside the axis: multiples of 1, 2 or 5 times a power of ten."""
        span = (self.high - self.low) or 1
        power = 10 ** math.floor(math.log10(span / count))
        step = next(power * m for m in (1, 2, 5, 10) if span / (power * m) <= count)
        first = math.ceil(self.low / step - 1e-9)
        return [round(i * step, 10) for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def short(value: float, significant: int = 3) -> str:
    """So many significant digits, a true minus sign, thousands separated: 0.00412, 12.3, −4, 11,743."""
    if value and abs(value) < 1e-4:
        return f"{value:.1e}".replace("-", "−")
    digits = max(0, significant - 1 - math.floor(math.log10(abs(value)))) if value else 0
    shown = f"{value:,.{digits}f}"
    return (shown.rstrip("0").rstrip(".") if "." in shown else shown).replace("-", "−")


def _value(value: str | float) -> str:
    if isinstance(value, str):
        return str(escape(value))
    return f"{value:.2f}".rstrip("0").rstrip(".")
