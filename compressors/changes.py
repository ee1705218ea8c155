"""How one stored tensor becomes a merged one: what every kind of merge gives the engine in `streaming.py`.

A tensor's rows are its slices along the first dimension; the elements of a vector are its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Rows = Callable[[int, int], Tensor]
"""rows(start, stop): those rows of the merged tensor in FP32 (FP64 where FP64 is stored), of its shape otherwise."""


class Change(Protocol):
    def begin(self, stored: Tensor) -> Rows:
        """Look at the whole stored tensor where that is needed, e.g. for its norms; then rows are asked for in order.

        `stored` has the dtype and shape that it is stored in; empty where the tensor is a new one.
        """


class Unchanged:
    """A tensor that stays what it is, under another name, in another dtype, or in another file."""

    def begin(self, stored: Tensor) -> Rows:
        return lambda start, stop: wide(stored[start:stop])


def wide(tensor: Tensor) -> Tensor:
    """The tensor in the dtype that is computed in: FP32, or FP64 where it is FP64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


class Scratch:
    """One block of memory, taken again for each block of rows: new memory costs page faults, and the cache.

    What is in it counts until it is taken for the next block.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._block = self._memory = torch.empty(0, dtype=dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self._memory.dtype

    def take(self, shape: tuple[int, ...]) -> Tensor:
        if self._block.shape != shape:
            size = math.prod(shape)
            if size > self._memory.numel():
                self._memory = torch.empty(size, dtype=self._memory.dtype)
            self._block = self._memory[:size].view(shape)
        return self._block

    def copy(self, tensor: Tensor) -> Tensor:
        """The tensor in the scratch's dtype; itself where it has that already."""
        return tensor if tensor.dtype == self._memory.dtype else self.take(tensor.shape).copy_(tensor)
