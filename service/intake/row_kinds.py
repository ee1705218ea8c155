"""Which columns stand together in a dataset's rows, and numbers that count past a list beside them.

A language model's rows are texts, questions or prompts by the columns that they have. Which columns are which says only
the evaluation, so what a row could mean is kept for every column.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_KINDS = 64
"""Combinations of columns that are kept with their first place; further ones are judged when the rows are read."""


class RowKinds:
    """Collects rows one by one. Places are `file, line N`."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, ...], str] = {}
        self._beyond: dict[tuple[str, str], list[Any]] = {}

    def add(self, row: Mapping[str, Any], where: str) -> None:
        columns = tuple(row)
        if columns not in self._places and len(self._places) < MAX_KINDS:
            self._places[columns] = where
        lists = [(name, len(value)) for name, value in row.items() if isinstance(value, list)]
        for name, value in row.items() if lists else ():
            if type(value) is int:
                self._compare(name, value, lists, where)

    def facts(self) -> dict[str, Any]:
        """`answers_beyond`: column of numbers, column of lists, first place, the number, the list's length."""
        return {
            "row_kinds": [[list(columns), place] for columns, place in self._places.items()],
            "answers_beyond": [[*columns, *found] for columns, found in self._beyond.items()],
        }

    def _compare(self, name: str, value: int, lists: list[tuple[str, int]], where: str) -> None:
        for column, length in lists:
            if value >= length:
                self._beyond.setdefault((name, column), [where, str(value)[:40], length])
