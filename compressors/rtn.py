"""Round to nearest: each weight by itself, on the grid of its group's own range or of the best smaller one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

from torch import Tensor

from compressors.clipping import clipped_grid
from compressors.codebook_grid import CodebookGrid, round_to_codebook
from compressors.integer_grid import IntegerGrid, QuantizedWeight, nearest_codes, round_to_nearest
from compressors.layer_algorithms import LayerOutcome, LayerWork
from compressors.weight_layouts import AnyWeight
from modelpress.quantization_recipes import QuantizeWeights

Rounding = Callable[[Tensor], AnyWeight]
CODEBOOK_NAMES: Mapping[str, Literal["nf4", "fp4"]] = {"nf4": "nf4", "fp4": "fp4"}
"""Scheme -> its table. Codebooks span each group's own range: there is nothing to search."""


def quantize_layer(layer: LayerWork, arguments: QuantizeWeights) -> LayerOutcome:
    """Every linear layer of `layer`; its inputs are not read. With `clip_search` ranges are searched on the weights."""
    rounding = chosen_rounding(layer.grid, arguments)
    return LayerOutcome({name: rounding(linear.weight) for name, linear in layer.linears.items()})


def chosen_rounding(grid: IntegerGrid, arguments: QuantizeWeights) -> Rounding:
    if arguments.clip_search and arguments.scheme not in CODEBOOK_NAMES:
        return partial(round_clipped, grid=grid)
    return plain_rounding(grid, arguments)


def plain_rounding(grid: IntegerGrid, arguments: QuantizeWeights) -> Rounding:
    """Round to nearest on the range of each group, as the scheme's grid spans it."""
    if (table := CODEBOOK_NAMES.get(arguments.scheme)) and grid.group_size:
        return partial(round_to_codebook, grid=CodebookGrid(table, grid.group_size))
    return partial(round_to_nearest, grid=grid)


def round_clipped(w_OI: Tensor, grid: IntegerGrid) -> QuantizedWeight:
    """On the range with the smallest squared error of the weights, group by group."""
    scales_OG, zeros_OG = clipped_grid(w_OI, grid, importance_I=None)
    return QuantizedWeight(grid, nearest_codes(w_OI, scales_OG, zeros_OG, grid=grid), scales_OG, zeros_OG)
