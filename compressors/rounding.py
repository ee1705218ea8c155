"""One tensor that changes: its rows rounded once, block by block, and how far it has moved."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from compressors.changes import Scratch, wide
from compressors.output_plan import OutputTensor
from modelpress.errors import InternalError, InvalidModel

BLOCK_ELEMENTS = 1 << 17
"""FP32 elements of a block of rows: a block and what becomes of it stay in the processor's cache."""


@dataclass(frozen=True)
class TensorRecord:
    """What became of a tensor: |W' - W| / |W| (Frobenius; |W'| where |W| is 0), and whether any byte changed.

    `relative` is None for a tensor that the base does not have in this shape.
    """

    relative: float | None
    changed: bool


class Rounding:
    """One tensor that changes: rounded block of rows by block of rows, and how far it has moved."""

    def __init__(self, tensor: OutputTensor, stored: Tensor) -> None:
        if tensor.change is None:
            raise ValueError(f"{tensor.name} does not change")
        self._tensor = tensor
        base = stored if tensor.decode is None else tensor.decode(stored)
        self.rows = tensor.change.begin(base)
        comparable = tuple(base.shape) == (tensor.shape or (1,)) and base.is_floating_point()
        self._before = base if comparable else None
        before, after = (wide(torch.empty(0, dtype=dtype)).dtype for dtype in (base.dtype, tensor.dtype))
        self._before_block, self._after_block = Scratch(before), Scratch(torch.promote_types(before, after))
        self._moved = self._norm = 0.0
        self._same_bytes = comparable and base.dtype == tensor.dtype and tensor.decode is None

    def round_into(self, rounded: Tensor, first: int) -> None:
        """Merge the rows from `first` on and round them, once, into `rounded`: block by block."""
        for start, stop in row_blocks(tuple(rounded.shape)):
            merged = self.rows(first + start, first + stop)
            if merged.shape != rounded[start:stop].shape:
                given, wanted = list(merged.shape), list(rounded[start:stop].shape)
                raise InternalError(f"a change of {self._tensor.name!r} gave rows {given}, its tensor has {wanted}")
            block = rounded[start:stop].copy_(merged)
            self._measure(block, merged, None if self._before is None else self._before[first + start : first + stop])

    def _measure(self, rounded: Tensor, merged: Tensor, stored: Tensor | None) -> None:
        if stored is None:
            self._add(sum_of_squares(wide(rounded)), merged)
            return
        before = self._before_block.copy(stored)
        after = self._after_block.copy(rounded)
        self._norm += sum_of_squares(before)
        self._add(sum_of_squares(torch.sub(after, before, out=self._after_block.take(after.shape))), merged)
        self._same_bytes = self._same_bytes and same_bytes(rounded, stored)

    def record(self) -> TensorRecord:
        if self._before is None:
            return TensorRecord(None, changed=True)
        return TensorRecord(math.sqrt(self._moved) / (math.sqrt(self._norm) or 1.0), not self._same_bytes)

    def _add(self, moved: float, merged: Tensor) -> None:
        if not math.isfinite(moved):
            self._refuse(merged)
        self._moved += moved

    def _refuse(self, merged: Tensor) -> None:
        name, dtype = self._tensor.name, str(self._tensor.dtype).removeprefix("torch.")
        largest = float(merged.abs().max())
        if math.isfinite(largest):
            raise InvalidModel(
                f"tensor {name!r} has the merged value {largest:g}, which {dtype} cannot hold: set the stage's "
                "output_dtype to float32 or bfloat16",
                reason="OVERFLOW",
                field=name,
            )
        raise InvalidModel(
            f"tensor {name!r} of the merged model holds NaN or infinite values: an adapter's weights, alpha or weight "
            "are too large, or it is damaged",
            reason="NON_FINITE",
            field=name,
        )


def row_blocks(shape: tuple[int, ...], *, elements: int | None = None) -> Iterator[tuple[int, int]]:
    """[start, stop) of blocks of rows that cover a tensor of this shape: of about so many elements (BLOCK_ELEMENTS
    without), of one row where a row is larger.
    """
    rows = shape[0] if shape else 1
    step = max(1, (elements or BLOCK_ELEMENTS) // max(1, math.prod(shape[1:])))
    start = 0
    while start < rows:
        stop = rows if rows - start < 2 * step else start + step
        yield start, stop
        start = stop


def sum_of_squares(block: Tensor) -> float:
    """In the block's own precision; in FP64 where that overflows. NaN and infinity stay what they are."""
    flat = block.reshape(-1)
    total = float(torch.dot(flat, flat))
    if math.isfinite(total):
        return total
    wider = flat.double()
    return float(torch.dot(wider, wider))


def same_bytes(left: Tensor, right: Tensor) -> bool:
    """Of tensors of one shape; -0.0 and 0.0 differ, and so do dtypes."""
    if left.dtype != right.dtype:
        return False
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
