"""Where a running step is: its place among the steps, and the time that is left at its own speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Position:
    """1-based `index` among `count` steps."""

    step: str
    index: int
    count: int

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, "step_index": self.index, "step_count": self.count}


class ProgressTeller:
    """Turns what a worker tells into what watchers see. Speed is measured from the first thing told on: a resumed step
    starts in the middle."""

    def __init__(self, position: Position, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._position = position
        self._clock = clock
        self._first: tuple[float, int] | None = None

    def told(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """`done`, `total` (0: not known), `loss` or None, and `remaining_s` or None."""
        now, done, total = self._clock(), int(body["done"]), int(body["total"])
        start, first_done = self._first = self._first or (now, done)
        speed = (done - first_done) / (now - start) if now > start else 0.0
        remaining = (total - done) / speed if speed > 0 and total >= done else None
        return {
            **self._position.to_json(),
            "done": done,
            "total": total,
            "loss": body["loss"],
            "remaining_s": remaining,
        }
