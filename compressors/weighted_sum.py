"""Several edits of one tensor, added to it by their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from compressors.changes import Scratch, wide
from compressors.edits import Edit, delta_rows, result_rows

Weighted = Sequence[tuple[Edit, float]]


@dataclass(frozen=True)
class WeightedSum:
    """base + sum of weight * change, rounded once at the end: PEFT's `cat`. One edit of weight 1 is itself."""

    edits: Weighted

    def begin(self, stored: Tensor) -> Callable[[int, int], Tensor]:
        (first, weight), *others = self.edits
        if weight == 1 and not others:
            result, scratch = result_rows(first, stored), Scratch(wide(stored[:0]).dtype)
            return lambda start, stop: result(start, stop, scratch.copy(stored[start:stop]))
        parts = [(delta_rows(edit, stored), weight) for edit, weight in self.edits]

        def rows(start: int, stop: int) -> Tensor:
            base = wide(stored[start:stop])
            return summed([_times(part(start, stop, base), weight) for part, weight in parts]).add_(base)

        return rows


def summed(tensors: Sequence[Tensor]) -> Tensor:
    """The sum in the order given, of at least one tensor; it takes the first one's place."""
    first, *others = tensors
    for tensor in others:
        first.add_(tensor)
    return first


def _times(tensor: Tensor, weight: float) -> Tensor:
    return tensor if weight == 1 else tensor.mul_(weight)
