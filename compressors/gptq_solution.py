"""From a weight and the Hessian of its inputs to codes and scales: GPTQ with everything the recipe adds to it.

The grid is fitted, with `clip_search` searched; GPTQ chooses the codes; with `refine_scales` scales and codes are
chosen again in turn, each at the minimum along its coordinate, up to the rounding of the scale dtype. Every output row
is a problem of its own, so a row that plain rounding does better than all that is left to rounding: tr(D H D^T), D = W
- Q, is never above that of rounding, in any row.

Shapes: O outputs, I inputs, G groups along I.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compressors.clipping import clipped_grid, counted_inputs
from compressors.coordinate_descent import descend
from compressors.gptq import FactoredHessian, factor_hessian, quantize_channels
from compressors.integer_grid import IntegerGrid, QuantizedWeight, fit_grid, round_to_nearest
from compressors.scale_refinement import refine_scales
from modelpress.quantization_recipes import QuantizeWeights

Step = Callable[[QuantizedWeight, Tensor, Tensor], QuantizedWeight]
REFINEMENT: tuple[Step, ...] = (refine_scales, descend, refine_scales)
"""What follows GPTQ with `refine_scales`. The last scales fit the last codes."""


@dataclass(frozen=True, eq=False)
class Solution:
    """`rounded_rows` of the weight's O rows are plain rounding; `damping` is the share that the Hessian needed."""

    weight: QuantizedWeight
    damping: float
    rounded_rows: int


def solve(w_OI: Tensor, h_II: Tensor, *, grid: IntegerGrid, arguments: QuantizeWeights) -> Solution:
    """Raises SingularHessian where H tells nothing."""
    hessian = factor_hessian(h_II, damping=arguments.damping)
    scales_OG, zeros_OG = _ranges(w_OI, hessian, grid=grid, arguments=arguments)
    chosen = quantize_channels(w_OI, hessian, grid=grid, scales_OG=scales_OG, zeros_OG=zeros_OG)
    for step in REFINEMENT if arguments.refine_scales else ():
        chosen = step(chosen, w_OI, h_II)
    rounded = round_to_nearest(w_OI, grid)
    better_O = output_errors(rounded, w_OI, h_II) < output_errors(chosen, w_OI, h_II)
    return Solution(_rows(better_O, rounded, chosen), hessian.damping, int(better_O.sum()))


def output_errors(weight: QuantizedWeight, w_OI: Tensor, h_II: Tensor) -> Tensor:
    """Each row's share [O] of tr(D H D^T): the mean square of that output's error."""
    error_OI = w_OI.float() - weight.dequantized()
    return ((error_OI @ h_II) * error_OI).sum(dim=1)


def split_rows(weight: QuantizedWeight, rows: Mapping[str, int]) -> dict[str, QuantizedWeight]:
    """The weights that lie one below the other in `weight`, each with so many rows, in this order."""
    sizes = list(rows.values())
    zeros = [None] * len(sizes) if weight.zeros_OG is None else torch.split(weight.zeros_OG, sizes)
    parts = zip(rows, torch.split(weight.codes_OI, sizes), torch.split(weight.scales_OG, sizes), zeros, strict=True)
    return {name: QuantizedWeight(weight.grid, codes, scales, zero) for name, codes, scales, zero in parts}


def _ranges(
    w_OI: Tensor, hessian: FactoredHessian, *, grid: IntegerGrid, arguments: QuantizeWeights
) -> tuple[Tensor, Tensor | None]:
    """Dead channels do not widen any range."""
    if arguments.clip_search:
        return clipped_grid(w_OI, grid, importance_I=hessian.importance())
    return fit_grid(w_OI * counted_inputs(grid, live_I=hessian.live_I), grid)


def _rows(take_O: Tensor, first: QuantizedWeight, second: QuantizedWeight) -> QuantizedWeight:
    """Rows of `first` where `take_O`, of `second` elsewhere."""
    take_O1 = take_O[:, None]
    zeros_OG = None
    if first.zeros_OG is not None and second.zeros_OG is not None:
        zeros_OG = torch.where(take_O1, first.zeros_OG, second.zeros_OG)
    return QuantizedWeight(
        first.grid,
        torch.where(take_O1, first.codes_OI, second.codes_OI),
        torch.where(take_O1, first.scales_OG, second.scales_OG),
        zeros_OG,
    )
