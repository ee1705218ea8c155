"""Datasets: JSON lines read into rows, every fault named with its line.

A dataset artifact is a folder with one or more `.jsonl` files, read in the order of their paths.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from modelpress.digests import CHUNK_BYTES
from modelpress.errors import InvalidDataset

MAX_LINE_CHARACTERS = 1_000_000
MAX_LINE_BYTES = 4 * MAX_LINE_CHARACTERS

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


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
    rule = LabelRule(label_column, tuple(known_labels), tuple(label_names))
    texts, labels = [], []
    for where, row in _rows(folder):
        texts.append(_text(row, text_column, where))
        labels.append(rule.name_of(_cell(row, label_column, where), where))
    return LabelledTexts(tuple(texts), tuple(labels))


def read_texts(folder: Path, *, text_column: str) -> LabelledTexts:
    """Read every row's text; labels, where there are any, are not looked at."""
    return LabelledTexts(tuple(_text(row, text_column, where) for where, row in _rows(folder)), ())


def rows_of_file(chunks: Iterable[bytes], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of one .jsonl file with their places (`train.jsonl, line 3`), in flat memory.

    A byte order mark, CRLF and blank lines are allowed. Raises InvalidDataset naming the place.
    """
    for number, (offset, data) in enumerate(_lines(chunks), 1):
        where = f"{name}, line {number}"
        if len(data) > MAX_LINE_BYTES or len(line := _decoded(data, offset, name)) > MAX_LINE_CHARACTERS:
            raise InvalidDataset(f"{where}: more than {MAX_LINE_CHARACTERS} characters", reason="BAD_ROW")
        if line.strip():
            yield where, _object(line, where)


@dataclass(frozen=True)
class LabelRule:
    """Which values `column` may hold: names that the model knows, or integers that `label_names` maps to such names."""

    column: str
    known_labels: tuple[str, ...]
    label_names: tuple[str, ...] = ()

    def name_of(self, value: Any, where: str) -> str:
        """The label's name; InvalidDataset, naming `where`, for a value that has none."""
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            self._refuse(where, f"column {self.column!r} holds {kind_of(value)}, expected a label name")
        if isinstance(value, int):
            if not self.label_names:
                self._refuse(where, f"label {value} is a number: give names, or `label_names` in the order of the ids")
            if not 0 <= value < len(self.label_names):
                self._refuse(where, f"label {value} has no name: `label_names` has {len(self.label_names)} entries")
            value = self.label_names[value]
        if value not in self.known_labels:
            known = ", ".join(self.known_labels)
            self._refuse(where, f"label {value[:80]!r} is unknown to the model, which knows {known}")
        return value

    def _refuse(self, where: str, what: str) -> NoReturn:
        raise InvalidDataset(f"{where}: {what}", field=self.column, reason="LABEL_UNKNOWN")


def refuse_missing(column: str, where: str, columns: Iterable[str]) -> NoReturn:
    """Raise InvalidDataset for a row without `column`; `columns` are those that there are."""
    raise InvalidDataset(
        f"{where}: no column {column!r}; columns here: {', '.join(columns)[:300] or 'none'}",
        field=column,
        reason="COLUMN_MISSING",
    )


def refuse_not_text(column: str, where: str, kind: str) -> NoReturn:
    """Raise InvalidDataset for a row whose text is none."""
    raise InvalidDataset(f"{where}: column {column!r} holds {kind}, expected text", field=column, reason="NOT_TEXT")


def kind_of(value: Any) -> str:
    """What people call a JSON value's type: `null`, `int`, `list`, ..."""
    return "null" if value is None else type(value).__name__


def _rows(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    files = sorted(folder.rglob("*.jsonl"))
    if not files:
        refuse_no_file()
    found = False
    for file in files:
        for row in rows_of_file(_chunks(file), file.relative_to(folder).as_posix()):
            found = True
            yield row
    if not found:
        refuse_empty(files[0].relative_to(folder).as_posix())


def refuse_no_file() -> NoReturn:
    """Raise InvalidDataset for a folder without a .jsonl file."""
    raise InvalidDataset(
        "the dataset has no .jsonl file: write one JSON object per line into a file named *.jsonl",
        reason="EMPTY_DATASET",
    )


def refuse_empty(name: str) -> NoReturn:
    """Raise InvalidDataset for files without a row; `name` is the first of them."""
    raise InvalidDataset(f"the dataset is empty: {name} has no rows", reason="EMPTY_DATASET")


def _chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as source:
        while chunk := source.read(CHUNK_BYTES):
            yield chunk


def _lines(chunks: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """(offset, line without its line feed); a line that never ends is given up before it fills the memory."""
    rest, offset = b"", 0
    for chunk in chunks:
        *complete, rest = (rest + chunk).split(b"\n")
        for line in complete:
            yield offset, line
            offset += len(line) + 1
        if len(rest) > MAX_LINE_BYTES:
            break
    yield offset, rest


def _decoded(data: bytes, offset: int, name: str) -> str:
    try:
        return data.decode("utf-8" if offset else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidDataset(
            f"{name} is not UTF-8 text (byte {offset + error.start}): convert it to UTF-8", reason="NOT_UTF8"
        ) from None


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        if _SURROGATE.search(line):
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidDataset(f"{where}: holds half a surrogate pair, which is no text", reason="NOT_UTF8") from None
    except (ValueError, RecursionError):
        raise InvalidDataset(f"{where}: not a JSON object", reason="BAD_ROW") from None
    if not isinstance(row, dict):
        raise InvalidDataset(f"{where}: expected a JSON object, found {kind_of(row)}", reason="BAD_ROW")
    return row


def _text(row: dict[str, Any], column: str, where: str) -> str:
    value = _cell(row, column, where)
    if not isinstance(value, str):
        refuse_not_text(column, where, kind_of(value))
    return value


def _cell(row: dict[str, Any], column: str, where: str) -> Any:
    if column not in row:
        refuse_missing(column, where, row)
    return row[column]
