"""Datasets: JSON lines read into rows, every fault named with its line.

A dataset artifact is a folder with one or more `.jsonl` files, read in the order of their paths.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from modelpress.errors import InvalidDataset

MAX_LINE_CHARACTERS = 1_000_000
NO_FILE = "the dataset has no .jsonl file: write one JSON object per line into a file named *.jsonl"
NO_ROWS = "the dataset is empty: {name} has no rows"


@dataclass(frozen=True)
class LabelledTexts:
    """Texts with label names, in file order. `labels` is empty where the data was read without labels.

    Every label is one of the model's names, spelt as the model spells it; `warnings` says where the data did not.
    """

    texts: tuple[str, ...]
    labels: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.labels and len(self.labels) != len(self.texts):
            raise InvalidDataset(f"{len(self.texts)} texts have {len(self.labels)} labels: every text needs one")

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class LabelNames:
    """How a row's label becomes one of the model's names: `known` are these, `by_id[i]` names integer label i."""

    known: tuple[str, ...]
    by_id: tuple[str, ...] = ()

    def name(self, value: str | int, where: str, column: str) -> str:
        """The name as the data spells it; an integer without a name is refused: ids of model and data may differ."""
        if isinstance(value, str):
            return value
        if not self.by_id:
            raise InvalidDataset(
                f"{where}: label {value} is a number: give label names, or write `label_names: [...]`, in the order "
                "of the dataset's ids, into the evaluation document (`--evaluation`)",
                field=column,
            )
        if not 0 <= value < len(self.by_id):
            entries = len(self.by_id)
            raise InvalidDataset(
                f"{where}: label {value} has no name: `label_names` has {entries} entries", field=column
            )
        return self.by_id[value]

    def of_model(self, name: str, where: str, column: str) -> str:
        """The model's spelling of `name`: the same, or the only one that differs from it in case alone."""
        if name in self.known:
            return name
        alike = [known for known in self.known if known.casefold() == name.casefold()]
        if len(alike) == 1:
            return alike[0]
        known_here = ", ".join(self.known)
        raise InvalidDataset(
            f"{where}: label {name[:80]!r} is unknown to the model, which knows {known_here}", field=column
        )


def read_labelled_texts(
    folder: Path, *, text_column: str, label_column: str, known_labels: Sequence[str], label_names: Sequence[str] = ()
) -> LabelledTexts:
    """Read every row's text and label.

    `known_labels` are the model's label names: another one is refused; one that differs in case alone is taken for it
    and said so. `label_names[i]` is the name of integer label i; without it an integer label is refused.
    Raises InvalidDataset naming file, line and column.
    """
    names = LabelNames(tuple(known_labels), tuple(label_names))
    texts, labels, respelt = [], [], {}
    for where, row in dataset_rows(folder):
        texts.append(text_of(row, text_column, where))
        given = names.name(_label(row, label_column, where), where, label_column)
        labels.append(names.of_model(given, where, label_column))
        if given != labels[-1]:
            respelt[given] = labels[-1]
    warnings = tuple(f"label {given!r} was taken for the model's {name!r}" for given, name in respelt.items())
    return LabelledTexts(tuple(texts), tuple(labels), warnings)


def read_texts(folder: Path, *, text_column: str) -> LabelledTexts:
    """Read every row's text; labels, where there are any, are not looked at."""
    return LabelledTexts(tuple(text_of(row, text_column, where) for where, row in dataset_rows(folder)), ())


def rows_of(source: TextIO, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of one .jsonl file with their places (`train.jsonl, line 3`), in flat memory.

    `source` is opened with `encoding="utf-8-sig", newline="\\n"`: a byte order mark, CRLF and blank lines are allowed.
    Raises InvalidDataset naming the place.
    """
    try:
        for where, line in _lines(source, name):
            yield where, _object(line, where)
    except UnicodeDecodeError as error:
        raise InvalidDataset(f"{name} is not UTF-8 text ({error.reason}): convert it to UTF-8") from None


def dataset_rows(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of every .jsonl file of a dataset with their places. InvalidDataset where there is none."""
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() == ".jsonl" and file.is_file())
    if not files:
        raise InvalidDataset(NO_FILE)
    found = False
    for file in files:
        with file.open(encoding="utf-8-sig", newline="\n") as source:
            for row in rows_of(source, file.relative_to(folder).as_posix()):
                found = True
                yield row
    if not found:
        raise InvalidDataset(NO_ROWS.format(name=files[0].relative_to(folder).as_posix()))


def _lines(source: TextIO, name: str) -> Iterator[tuple[str, str]]:
    """Lines with their place, blank ones left out."""
    number = 0
    while line := source.readline(MAX_LINE_CHARACTERS + 1):
        number += 1
        if len(line) > MAX_LINE_CHARACTERS:
            raise InvalidDataset(f"{name}, line {number}: more than {MAX_LINE_CHARACTERS} characters")
        if line.strip():
            yield f"{name}, line {number}", line


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        raise InvalidDataset(f"{where}: not a JSON object with every key given once") from None
    if not isinstance(row, dict):
        raise InvalidDataset(f"{where}: expected a JSON object, found {kind_of(row)}")
    return row


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Plain JSON keeps the last of two equal keys silently."""
    row = dict(pairs)
    if len(row) != len(pairs):
        raise ValueError("a key is given twice")
    return row


def text_of(row: Mapping[str, Any], column: str, where: str) -> str:
    """The text in `column`; InvalidDataset naming place and column where there is none."""
    value = _cell(row, column, where)
    if not isinstance(value, str):
        raise InvalidDataset(f"{where}: column {column!r} holds {kind_of(value)}, expected text", field=column)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidDataset(f"{where}: column {column!r} holds half a surrogate pair", field=column) from None
    return value


def _label(row: dict[str, Any], column: str, where: str) -> str | int:
    value = _cell(row, column, where)
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise InvalidDataset(f"{where}: column {column!r} holds {kind_of(value)}, expected a label name", field=column)
    return value


def _cell(row: Mapping[str, Any], column: str, where: str) -> Any:
    if column not in row:
        columns = ", ".join(row)[:200] or "none"
        raise InvalidDataset(f"{where}: no column {column!r}; columns here: {columns}", field=column)
    return row[column]


def kind_of(value: Any) -> str:
    """What a cell of JSON holds, for an error."""
    return "null" if value is None else type(value).__name__
