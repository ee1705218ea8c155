"""What a merge of checkpoints sees of each tensor on its way, kept with its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from compressors.stages import Monitor, Progress

_FILE = "figures.json"


@dataclass(frozen=True)
class Figures:
    """One figure of every tensor in which a model differs from the base: what its method's `summary` is about."""

    of_tensors: dict[str, float | None] = field(default_factory=dict)

    @staticmethod
    def resumed(folder: Path | None) -> Figures:
        """Those that an earlier attempt's checkpoint holds; none where there was no attempt."""
        return Figures(json.loads((folder / _FILE).read_text()) if folder else {})

    def save(self, folder: Path) -> None:
        (folder / _FILE).write_text(json.dumps(self.of_tensors))

    def note(self, tensor: str, figure: float | None) -> None:
        self.of_tensors[tensor] = figure

    def summary(self, method: str) -> dict[str, Any]:
        """The angles of SLERP, the shares of sign conflicts of TIES; nothing for the other methods."""
        values = [value for value in self.of_tensors.values() if value is not None]
        if method == "slerp" and values:
            return {"angle_rad": {"smallest": min(values), "largest": max(values)}}
        if method in ("ties", "dare_ties") and values:
            return {"sign_conflicts": {"largest": max(values), "mean": mean(values)}}
        return {}


class FiguresMonitor:
    """A monitor whose checkpoints hold the figures as well."""

    def __init__(self, monitor: Monitor, figures: Figures) -> None:
        self._monitor = monitor
        self._figures = figures

    def progress(self, progress: Progress) -> None:
        self._monitor.progress(progress)

    def save_checkpoint(self, step: int, write: Callable[[Path], None]) -> None:
        def write_both(folder: Path) -> None:
            write(folder)
            self._figures.save(folder)

        self._monitor.save_checkpoint(step, write_both)

    def checkpoint(self) -> Path | None:
        return self._monitor.checkpoint()
