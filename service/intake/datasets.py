"""Datasets: every row read once, and what each column holds kept as facts.

Preflight judges columns and labels from these facts, with the place of the first row at fault, so that no dataset is
read twice and none is found wanting only after hours of training.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from modelpress.datasets import NO_FILE, NO_ROWS, rows_of
from modelpress.errors import InvalidDataset
from service.intake.columns import MAX_COLUMNS, MAX_NAME_CHARACTERS, Column
from service.intake.folder import Folder, refuse_payloads
from service.intake.row_kinds import RowKinds


def inspect_dataset(folder: Folder) -> dict[str, Any]:
    """Row count, facts of every column, and which stand together; InvalidDataset names file and line."""
    refuse_payloads(folder, InvalidDataset)
    files = folder.with_suffix(".jsonl")
    if not files:
        raise InvalidDataset(NO_FILE)
    columns: dict[str, Column] = {}
    kinds = RowKinds()
    rows = 0
    first = ""
    for where, row in _rows(folder):
        first = first or where
        _look_at(row, where, columns, first)
        kinds.add(row, where)
        rows += 1
    if not rows:
        raise InvalidDataset(NO_ROWS.format(name=files[0].path))
    read = set(files)
    others = [entry.path for entry in folder.manifest.files if entry not in read]
    return {
        "rows": rows,
        "columns": {name: column.facts() for name, column in columns.items()},
        **kinds.facts(),
        "warnings": [f"{path} is no .jsonl file: not read" for path in others[:20]],
    }


def _look_at(row: dict[str, Any], where: str, columns: dict[str, Column], first: str) -> None:
    for name, value in row.items():
        if name not in columns:
            if len(columns) == MAX_COLUMNS:
                raise InvalidDataset(f"{where}: more than {MAX_COLUMNS} columns")
            _check_name(name, where)
            columns[name] = Column(missing_at="" if where == first else first)
        columns[name].add(value, where)
    for name, column in columns.items():
        if name not in row:
            column.miss(where)


def _check_name(name: str, where: str) -> None:
    if len(name) > MAX_NAME_CHARACTERS:
        raise InvalidDataset(
            f"{where}: column {name[:40]!r}... has a name of more than {MAX_NAME_CHARACTERS} characters"
        )
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InvalidDataset(f"{where}: a column's name holds half a surrogate pair") from None


def _rows(folder: Folder) -> Iterator[tuple[str, dict[str, Any]]]:
    for entry in folder.with_suffix(".jsonl"):
        chunks = folder.chunks(entry, 0, entry.size_bytes)
        with io.TextIOWrapper(io.BufferedReader(_Chunks(chunks)), encoding="utf-8-sig", newline="\n") as source:
            yield from rows_of(source, entry.path)


class _Chunks(io.RawIOBase):
    """Chunks of bytes as a readable stream."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = chunk
        taken, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)
