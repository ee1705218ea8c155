"""Choose each group's range by search: a smaller step costs a clipped outlier and gains on every other weight.

    scales_OG, zeros_OG = clipped_grid(w_OI, grid, importance_I=hessian_II.diagonal())

The range that `fit_grid` spans is scaled by each factor of a fixed list, and each group keeps the factor with the
smallest sum of importance * (w - q)^2, as the MSE observers of the field do (llm-compressor's `mse`, AWQ's clip).

Shapes: O outputs, I inputs, G groups along I.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressors.integer_grid import IntegerGrid, dequantize, fit_grid, nearest_codes, usable_scales

FACTORS: tuple[float, ...] = tuple((43 - step) / 40 for step in range(24))
"""1.075, 1.05 ... 0.5. Above 1: `fit_grid` clips the largest positive weight of a symmetric group by half a step."""
_ROWS = 64
"""Rows searched at a time: what fits in a core's cache is read once for all factors."""


def clipped_grid(w_OI: Tensor, grid: IntegerGrid, *, importance_I: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Scales (in the grid's scale dtype) and zero points of the best of FACTORS for each group.

    `importance_I` weighs the squared error of each input channel, e.g. the mean square of that input; None: all alike.
    The error of a group is never above that of `fit_grid`. Inputs of importance 0 do not count: their weights are left
    out of the range, unless the whole group has none; then all of it counts alike.
    """
    ones_I = torch.ones(w_OI.shape[1], device=w_OI.device)
    importance_I = ones_I if importance_I is None else importance_I.float()
    alone_I = counted_inputs(grid, live_I=importance_I > 0) & (importance_I <= 0)
    importance_I = torch.where(alone_I, ones_I, importance_I)
    parts = [_search(rows_OI.float(), grid, importance_I=importance_I) for rows_OI in torch.split(w_OI, _ROWS)]
    scales_OG = torch.cat([scales for scales, _ in parts])
    zeros = [zeros_OG for _, zeros_OG in parts if zeros_OG is not None]
    return scales_OG, torch.cat(zeros) if zeros else None


def counted_inputs(grid: IntegerGrid, *, live_I: Tensor) -> Tensor:
    """Which inputs [I] a group's range is fitted to: those that are live, or all where none of the group is."""
    live_GK = live_I.reshape(grid.groups(live_I.numel()), -1)
    return (live_GK | ~live_GK.any(dim=-1, keepdim=True)).reshape(-1)


def _search(w_OI: Tensor, grid: IntegerGrid, *, importance_I: Tensor) -> tuple[Tensor, Tensor | None]:
    full_OG, zeros_OG = fit_grid(w_OI * (importance_I > 0), grid)
    best_OG, best_error_OG = full_OG, torch.full(full_OG.shape, torch.inf, device=w_OI.device)
    for factor in FACTORS:
        scales_OG = usable_scales(full_OG.float() * factor, grid)
        error_OG = _error(w_OI, scales_OG, zeros_OG, grid=grid, importance_I=importance_I)
        better_OG = error_OG < best_error_OG
        best_OG = torch.where(better_OG, scales_OG, best_OG)
        best_error_OG = torch.where(better_OG, error_OG, best_error_OG)
    return best_OG, zeros_OG


def _error(
    w_OI: Tensor, scales_OG: Tensor, zeros_OG: Tensor | None, *, grid: IntegerGrid, importance_I: Tensor
) -> Tensor:
    """Sum over each group of importance * (w - q)^2, [O, G]."""
    codes_OI = nearest_codes(w_OI, scales_OG, zeros_OG, grid=grid)
    squared_OI = (w_OI - dequantize(codes_OI, scales_OG, zeros_OG).float()).square() * importance_I
    return squared_OI.reshape(*scales_OG.shape, -1).sum(dim=-1)
