"""Logs: one JSON object per line on standard error, with the conversion that the line belongs to.

    {"time": "2026-11-30T12:00:00.000Z", "level": "info", "logger": "service.app", "message": "...",
     "conversion": "<id>", ...}

A record's own facts are given as `extra={"fields": {...}}`. Headers, tokens and request bodies are never logged.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime, timezone
from typing import TextIO

_conversion: ContextVar[str] = ContextVar("conversion", default="")


@contextmanager
def conversion_context(identifier: str) -> Iterator[None]:
    """Every line logged inside, also by threads started through `Threads`, names the conversion."""
    token = _conversion.set(identifier)
    try:
        yield
    finally:
        _conversion.reset(token)


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        line = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if conversion := _conversion.get():
            line["conversion"] = conversion
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure_logging(level: str, stream: TextIO = sys.stderr) -> None:
    """Send every logger's records of at least `level` to `stream`. Libraries log from `warning` on."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("service").setLevel(level.upper())
