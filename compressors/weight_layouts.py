"""How quantized weights lie in a model folder, by scheme: integers as compressed-tensors, codebooks as bitsandbytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from compressors import bitsandbytes_layout, pack_quantized
from compressors.codebook_grid import CodebookWeight
from compressors.integer_grid import IntegerGrid, QuantizedWeight
from modelpress.quantization_recipes import CODEBOOKS, QuantizeWeights

AnyWeight = QuantizedWeight | CodebookWeight
Load = Callable[[str], Tensor]


class WeightLayout(Protocol):
    def stored(self, module: str, weight: AnyWeight) -> dict[str, Tensor]:
        """The tensors by their full names."""

    def read(self, module: str, load: Load) -> AnyWeight:
        """The weight of which `stored` made these."""

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """The config's `quantization_config`; `ignored` are all linear layers that stay float."""


@dataclass(frozen=True)
class IntegerLayout:
    arguments: QuantizeWeights
    grid: IntegerGrid

    def stored(self, module: str, weight: AnyWeight) -> dict[str, Tensor]:
        return pack_quantized.stored_tensors(module, cast(QuantizedWeight, weight), scheme=self.arguments.scheme)

    def read(self, module: str, load: Load) -> AnyWeight:
        return pack_quantized.read_weight(module, load, quantization=self.config(()))

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        return pack_quantized.quantization_config(self.arguments, grid=self.grid, ignored=ignored)


@dataclass(frozen=True)
class CodebookLayout:
    """`dtype` is that of the weights before they were quantized."""

    arguments: QuantizeWeights
    dtype: torch.dtype

    def stored(self, module: str, weight: AnyWeight) -> dict[str, Tensor]:
        return bitsandbytes_layout.stored_tensors(module, cast(CodebookWeight, weight), dtype=self.dtype)

    def read(self, module: str, load: Load) -> AnyWeight:
        return bitsandbytes_layout.read_weight(module, load, quantization=self.config(()))

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        return bitsandbytes_layout.quantization_config(self.arguments, dtype=self.dtype, ignored=ignored)


def weight_layout(arguments: QuantizeWeights, grid: IntegerGrid, *, dtype: torch.dtype) -> WeightLayout:
    """The layout of the scheme; `dtype` is that of the weights before they were quantized."""
    if arguments.scheme in CODEBOOKS:
        return CodebookLayout(arguments, dtype)
    return IntegerLayout(arguments, grid)
