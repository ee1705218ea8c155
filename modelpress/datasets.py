"""Datasets: JSON lines read into rows, every fault named with its line.

A dataset artifact is a folder with one or more `.jsonl` files, read in the order of their paths.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelpress.errors import InvalidDataset

MAX_LINE_CHARACTERS = 1_000_000


@dataclass(frozen=True)
class LabelledTexts:
    """Texts with label names, in file order. `labels` is empty where the data was read without labels."""

    texts: tuple[str, ...]
    labels: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.texts)


def read_labelled_texts(
    folder: Path, *, text_column: str, label_column: str, known_labels: Sequence[str], label_names: Sequence[str] = ()
) -> LabelledTexts:
    """Read every row's text and label.

    `known_labels` are the model's label names: another one is refused. `label_names[i]` is the name of integer
    label i; without it an integer label is refused, since ids of model and data may differ.
    Raises InvalidDataset naming file, line and column.
    """
    texts, labels = [], []
    for where, row in _rows(folder):
        texts.append(_text(row, text_column, where))
        labels.append(_label(row, label_column, where, known_labels, label_names))
    return LabelledTexts(tuple(texts), tuple(labels))


def read_texts(folder: Path, *, text_column: str) -> LabelledTexts:
    """Read every row's text; labels, where there are any, are not looked at."""
    return LabelledTexts(tuple(_text(row, text_column, where) for where, row in _rows(folder)), ())


def _rows(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    files = sorted(folder.rglob("*.jsonl"))
    if not files:
        raise InvalidDataset("the dataset has no .jsonl file: write one JSON object per line into a file named *.jsonl")
    found = False
    for file in files:
        name = file.relative_to(folder).as_posix()
        for where, line in _lines(file, name):
            found = True
            yield where, _object(line, where)
    if not found:
        raise InvalidDataset(f"the dataset is empty: {files[0].relative_to(folder).as_posix()} has no rows")


def _lines(file: Path, name: str) -> Iterator[tuple[str, str]]:
    """Lines with their place; a byte order mark, CRLF and blank lines are allowed."""
    try:
        with file.open(encoding="utf-8-sig", newline="\n") as source:
            for number, line in enumerate(source, 1):
                if len(line) > MAX_LINE_CHARACTERS:
                    raise InvalidDataset(f"{name}, line {number}: more than {MAX_LINE_CHARACTERS} characters")
                if line.strip():
                    yield f"{name}, line {number}", line
    except UnicodeDecodeError as error:
        raise InvalidDataset(f"{name} is not UTF-8 text (byte {error.start}): convert it to UTF-8") from None


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise InvalidDataset(f"{where}: not a JSON object") from None
    if not isinstance(row, dict):
        raise InvalidDataset(f"{where}: expected a JSON object, found {type(row).__name__}")
    return row


def _text(row: dict[str, Any], column: str, where: str) -> str:
    value = _cell(row, column, where)
    if not isinstance(value, str):
        raise InvalidDataset(f"{where}: column {column!r} holds {_kind(value)}, expected text", field=column)
    return value


def _label(row: dict[str, Any], column: str, where: str, known: Sequence[str], names: Sequence[str]) -> str:
    value = _cell(row, column, where)
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise InvalidDataset(f"{where}: column {column!r} holds {_kind(value)}, expected a label name", field=column)
    if isinstance(value, int):
        if not names:
            raise InvalidDataset(
                f"{where}: label {value} is a number: give label names, or `label_names` in the order of the dataset's ids",
                field=column,
            )
        if not 0 <= value < len(names):
            raise InvalidDataset(f"{where}: label {value} has no name: `label_names` has {len(names)} entries", field=column)
        value = names[value]
    if value not in known:
        raise InvalidDataset(f"{where}: label {value!r} is unknown to the model, which knows {', '.join(known)}", field=column)
    return value


def _cell(row: dict[str, Any], column: str, where: str) -> Any:
    if column not in row:
        raise InvalidDataset(f"{where}: no column {column!r}; columns here: {', '.join(map(str, row)) or 'none'}", field=column)
    return row[column]


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
