"""What a stage noted of itself, as text for people: JSON values in words, long ones folded behind a summary."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from service.report.svg import short

LONG_CHARACTERS = 120
FEW_ENTRIES = 6
"""Of a mapping that is shown whole, however long."""
_OPERATOR = re.compile(r"\((\w+)\)$")


class Fact(NamedTuple):
    """`more` is what is folded away where the value is long: a line each."""

    name: str
    text: str
    more: tuple[str, ...] = ()


def facts(values: Mapping[str, Any]) -> list[Fact]:
    """Every value of `values`, in its order; nothing is left out."""
    return [_fact(name.replace("_", " "), value) for name, value in values.items()]


def fact_text(value: Any) -> str:
    """One JSON value on one line: numbers shortened, equal neighbours of a list counted."""
    if value is None or value in ([], {}):
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{name.replace('_', ' ')} {fact_text(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return _list_text(value)
    if isinstance(value, float):
        return short(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    return str(value)


def operator_counts(nodes: Sequence[str]) -> str:
    """Nodes named `node_add_37 (Add)`, counted by operator: `25 Add, 13 LayerNormalization`."""
    matches = (_OPERATOR.search(node) for node in nodes)
    counts = Counter(match.group(1) if match else "other" for match in matches)
    return ", ".join(f"{count} {operator}" for operator, count in counts.most_common())


def _fact(name: str, value: Any) -> Fact:
    text = fact_text(value)
    if len(text) <= LONG_CHARACTERS or (isinstance(value, Mapping) and len(value) <= FEW_ENTRIES):
        return Fact(name, text)
    if isinstance(value, Mapping):
        lines = tuple(f"{key} {fact_text(item)}" for key, item in value.items())
        return Fact(name, f"{len(value)} entries{_range(list(value.values()))}", lines)
    if isinstance(value, (list, tuple)):
        return Fact(name, f"{len(value)} entries", tuple(fact_text(item) for item in value))
    return Fact(name, text)


def _range(values: Sequence[Any]) -> str:
    if not all(isinstance(value, (int, float)) for value in values):
        return ""
    return f", {short(min(values))} to {short(max(values))}"


def _list_text(values: Sequence[Any]) -> str:
    if len(values) > 1 and all(value == values[0] for value in values):
        return f"{fact_text(values[0])} × {len(values)}"
    joiner = "; " if any(isinstance(value, (Mapping, list, tuple)) for value in values) else ", "
    return joiner.join(fact_text(value) for value in values)
