"""What watchers are told of a step: its place among the steps, the time left at its own speed, and what it found."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

FIGURES: Mapping[str, tuple[str, ...]] = {
    "held_out_accuracy_before": ("before", "accuracy"),
    "held_out_accuracy": ("after", "accuracy"),
    "held_out_flips_before": ("before", "flips"),
    "held_out_flips": ("after", "flips"),
    "held_out_kl_before": ("before", "kl"),
    "held_out_kl": ("after", "kl"),
    "size_bytes": ("details", "size_bytes"),
    "peak_memory_bytes": ("peak_memory_bytes",),
    "accuracy_before": ("baseline", "accuracy", "value"),
    "accuracy": ("candidate", "accuracy", "value"),
    "footprint_bytes_before": ("footprint", "baseline_bytes"),
    "footprint_bytes": ("footprint", "candidate_bytes"),
    "flips": ("flips",),
    "kl_mean": ("kl_mean", "value"),
    "label_changes": ("label_changes",),
    "max_logit_difference": ("max_logit_difference",),
}
"""Name on the wire -> where it stands in a step's record. With `X_before` stands `X`, the same figure afterwards."""


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


def figures_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The few numbers of a finished step's record that a person wants to see at once."""
    found = {name: _at(record, path) for name, path in FIGURES.items()}
    rows = record.get("rows")
    for row in rows if isinstance(rows, list) else ():
        found[f"speedup_{row['batch_size']}x{row['sequence_length']}"] = row["speedup"]
    return {name: float(value) for name, value in found.items() if value is not None}


def _at(record: Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    """The number at the path; None where there is none."""
    value: Any = record
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, int | float) else None
