"""Where a training run stands: plain values, which a checkpoint keeps as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from modelpress.reports import CurvePoint


@dataclass(frozen=True)
class Standing:
    """After `step` steps. `before` and `best` are held-out figures: at the start, and at the best look so far.

    For every standing s: Standing.from_json(s.to_json()) == s.
    """

    step: int
    best_step: int
    before: Mapping[str, float]
    best: Mapping[str, float]
    curve: tuple[CurvePoint, ...] = ()
    pending: tuple[float, ...] = ()
    """Losses since the last point of the curve."""

    @staticmethod
    def at_start(figures: Mapping[str, float]) -> Standing:
        return Standing(step=0, best_step=0, before=figures, best=figures)

    @property
    def loss(self) -> float:
        """Of the newest step."""
        return self.pending[-1] if self.pending else self.curve[-1].loss

    def after_step(self, loss: float, *, points_every: int) -> Standing:
        """One step further; every `points_every` steps the losses become a point of the curve."""
        moved = replace(self, step=self.step + 1, pending=(*self.pending, loss))
        return moved._with_point({}) if moved.step % points_every == 0 else moved

    def after_look(self, figures: Mapping[str, float]) -> Standing:
        """With these held-out figures; they are the best where their KL is lower than all before."""
        looked = self._with_point(dict(figures))
        if not figures["kl"] < self.best["kl"]:
            return looked
        return replace(looked, best_step=self.step, best=figures)

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "best_step": self.best_step,
            "before": dict(self.before),
            "best": dict(self.best),
            "curve": [point.model_dump() for point in self.curve],
            "pending": list(self.pending),
        }

    @staticmethod
    def from_json(facts: Mapping[str, Any]) -> Standing:
        points = tuple(CurvePoint(**point) for point in facts["curve"])
        return Standing(**{**facts, "curve": points, "pending": tuple(facts["pending"])})

    def _with_point(self, held_out: dict[str, float]) -> Standing:
        """Close the pending losses into a point; a look right after a point adds its figures to that point."""
        if not self.pending:
            last = self.curve[-1]
            return replace(self, curve=(*self.curve[:-1], last.model_copy(update={"held_out": held_out})))
        mean = sum(self.pending) / len(self.pending)
        return replace(self, curve=(*self.curve, CurvePoint(step=self.step, loss=mean, held_out=held_out)), pending=())
