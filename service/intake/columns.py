"""What one column of a dataset holds: where it is missing or no text, which values, and a sketch of its texts.

The sketch is a bottom-k sample of the texts' hashes (Cohen 1997, "Size-estimation framework"): with at most k distinct
texts it is all of them and the overlap of two datasets is exact; beyond it, an estimate.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from modelpress.errors import InvalidDataset

MAX_COLUMNS = 32
MAX_NAME_CHARACTERS = 255
MAX_VALUES = 1024
"""Distinct values that are kept with their first place."""
FEW_VALUES = 16
"""How many of them stay where a column has more than MAX_VALUES: it is a column of texts."""
MAX_VALUE_CHARACTERS = 255
SKETCH_SIZE = 16_384

Hashes = npt.NDArray[np.uint64]


class Sketch:
    """The `SKETCH_SIZE` smallest distinct hashes of the texts seen, and how many distinct ones that stands for."""

    def __init__(self) -> None:
        self._smallest: Hashes = np.empty(0, dtype=np.uint64)
        self._new: list[int] = []

    def add(self, text: bytes) -> None:
        self._new.append(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"))
        if len(self._new) >= 4 * SKETCH_SIZE:
            self._fold()

    def facts(self) -> dict[str, Any]:
        self._fold()
        return {"texts": base64.b64encode(self._smallest.astype("<u8").tobytes()).decode()}

    def _fold(self) -> None:
        merged = np.union1d(self._smallest, np.array(self._new, dtype=np.uint64))
        self._smallest, self._new = merged[:SKETCH_SIZE], []


@dataclass(frozen=True)
class Odd:
    """The first value of another type than expected: its place and what people call the type."""

    at: str = ""
    kind: str = ""


@dataclass
class Column:
    """Collects one column row by row. Places are `file, line N`; empty: nowhere."""

    missing_at: str = ""
    not_text: Odd = Odd()
    not_label: Odd = Odd()
    not_choices: Odd = Odd()
    """The first value that is no list of two or more different texts, none of them empty."""
    not_count: Odd = Odd()
    """The first value that is no integer from 0 on."""
    text_bytes: int = 0
    """UTF-8 bytes of all texts together."""
    values: dict[str | int, list[Any]] = field(default_factory=dict)
    overflowed: bool = False
    sketch: Sketch = field(default_factory=Sketch)

    def add(self, value: Any, where: str) -> None:
        is_text = isinstance(value, str)
        if is_text:
            encoded = _encoded(value, where)
            self.sketch.add(encoded)
            self.text_bytes += len(encoded)
        elif not self.not_text.at:
            self.not_text = Odd(where, _kind(value))
        if is_text or (isinstance(value, int) and not isinstance(value, bool)):
            self._count(value[: MAX_VALUE_CHARACTERS + 1] if is_text else value, where)
        elif not self.not_label.at:
            self.not_label = Odd(where, _kind(value))
        if not self.not_choices.at and (kind := _no_choices(value)):
            self.not_choices = Odd(where, kind)
        if not self.not_count.at and not (type(value) is int and value >= 0):
            self.not_count = Odd(where, str(value)[:40] if type(value) is int else _kind(value))

    def miss(self, where: str) -> None:
        self.missing_at = self.missing_at or where

    def facts(self) -> dict[str, Any]:
        """`values` are [value, rows, first place]: all of them, or the first few where there are too many."""
        kept = list(self.values.items())[: FEW_VALUES if self.overflowed else None]
        return {
            "missing_at": self.missing_at,
            "not_text": [self.not_text.at, self.not_text.kind],
            "not_label": [self.not_label.at, self.not_label.kind],
            "not_choices": [self.not_choices.at, self.not_choices.kind],
            "not_count": [self.not_count.at, self.not_count.kind],
            "text_bytes": self.text_bytes,
            "values": [[_storable(value), *seen] for value, seen in kept],
            "values_complete": not self.overflowed,
            **self.sketch.facts(),
        }

    def _count(self, value: str | int, where: str) -> None:
        if value in self.values:
            self.values[value][0] += 1
        elif len(self.values) == MAX_VALUES:
            self.overflowed = True
        else:
            self.values[value] = [1, where]


@dataclass(frozen=True)
class Overlap:
    """Distinct texts of one column that another holds too: the share of the first's, exact or estimated."""

    share: float
    exact: bool


def overlap(column: Mapping[str, Any], other: Mapping[str, Any]) -> Overlap:
    """How much of `column`'s distinct texts stands in `other` (facts of two columns)."""
    ours, theirs = _hashes(column), _hashes(other)
    full = [hashes for hashes in (ours, theirs) if len(hashes) == SKETCH_SIZE]
    if full:
        limit = min(hashes[-1] for hashes in full)
        ours, theirs = ours[ours <= limit], theirs[theirs <= limit]
    share = float(np.isin(ours, theirs).mean()) if len(ours) else 0.0
    return Overlap(share, exact=not full)


def _hashes(column: Mapping[str, Any]) -> Hashes:
    return np.frombuffer(base64.b64decode(column["texts"]), dtype="<u8").astype(np.uint64)


def _no_choices(value: Any) -> str:
    """What a value is that is no list of two or more different texts, none of them empty; of such a list nothing."""
    if not isinstance(value, list):
        return _kind(value)
    odd = next((choice for choice in value if not isinstance(choice, str)), "")
    if odd != "":
        return f"a list with {_kind(odd)}"
    if len(value) < 2:
        return f"a list of {len(value)}"
    if "" in value:
        return "a list with an empty text"
    return "a list with one text twice" if len(set(value)) < len(value) else ""


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "null" if value is None else type(value).__name__


def _storable(value: str | int) -> str | int:
    """A number that a database's JSON may not hold is kept as text."""
    return value if isinstance(value, str) or abs(value) < 1 << 53 else str(value)


def _encoded(text: str, where: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidDataset(f"{where}: a text holds half a surrogate pair, which no UTF-8 text can hold") from None
