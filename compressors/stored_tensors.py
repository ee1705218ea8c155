"""What a reader of weights needs to know of tensors that it does not hold: shapes and dtypes at once, values singly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor


class Stored(Protocol):
    """A stored tensor before its values are read."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...


class Tensors(Protocol):
    """A model's or an adapter's tensors by stored name."""

    @property
    def tensors(self) -> Mapping[str, Stored]: ...
    def load(self, name: str, /) -> Tensor: ...
