"""What commands print: results on stdout, as text or as exactly one JSON document; everything else on stderr."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, RenderableType
from rich.text import Text

from modelpress.cli.exits import Exit, of_error
from modelpress.errors import ModelpressError

PIPE_WIDTH = 160
"""Columns where stdout is no terminal: wide enough that tables are not cut."""


class Output(Protocol):
    """One command's two streams."""

    notes: Console
    """Progress, warnings and errors: stderr."""

    def result(self, document: Any, text: RenderableType) -> None:
        """Print the command's result, once: `document` for programs or `text` for people."""

    def error(self, error: ModelpressError) -> Exit:
        """Say what is wrong in one sentence; returns the exit code."""


class TextOutput:
    def __init__(self) -> None:
        self.notes = _console(sys.stderr)
        self._results = _console(sys.stdout)

    def result(self, document: Any, text: RenderableType) -> None:
        self._results.print(text, soft_wrap=True)

    def error(self, error: ModelpressError) -> Exit:
        note(self.notes, f"error: {error.message}")
        return of_error(error)


class JsonOutput:
    """The document on stdout even where the command fails: `{"error": {...}}`."""

    def __init__(self) -> None:
        self.notes = _console(sys.stderr)

    def result(self, document: Any, text: RenderableType) -> None:
        print(json.dumps(to_json(document), indent=2, ensure_ascii=False, allow_nan=False))

    def error(self, error: ModelpressError) -> Exit:
        code = of_error(error)
        note(self.notes, f"error: {error.message}")
        facts = {"reason": error.reason, "message": error.message, "field": error.field, "metadata": error.metadata}
        self.result({"error": {**facts, "exit_code": int(code)}}, "")
        return code


def to_json(value: Any) -> Any:
    """Dataclasses as objects, enums by value, times as RFC 3339, paths as text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    return str(value) if isinstance(value, Path) else value


def note(console: Console, text: str) -> None:
    """One line on `console`, however long."""
    console.print(printable(text), soft_wrap=True)


def printable(text: str) -> Text:
    """Text without markup or control characters: names and messages come from elsewhere."""
    return Text("".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text))


def _console(stream: Any) -> Console:
    width = None if stream.isatty() else PIPE_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False, soft_wrap=False)
