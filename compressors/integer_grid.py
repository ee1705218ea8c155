"""The grid of integer weights: a step per group of input channels, and for asymmetric ones a zero point.

As compressed-tensors defines it: value = (code - zero point) * scale, codes and zero points signed, in
[-2^(b-1), 2^(b-1) - 1]. A symmetric grid has the zero point 0.

Shapes: O outputs, I inputs, G groups along I; a group has I / G neighbouring inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class IntegerGrid:
    """`group_size` None: one group, the whole row. `scale_dtype` is the dtype in which scales are stored."""

    num_bits: int
    symmetric: bool
    group_size: int | None
    scale_dtype: torch.dtype

    @property
    def lowest(self) -> int:
        return -(1 << (self.num_bits - 1))

    @property
    def highest(self) -> int:
        return (1 << (self.num_bits - 1)) - 1

    def groups(self, inputs: int) -> int:
        """G of a weight with so many inputs, which `group_size` must divide."""
        return inputs // (self.group_size or inputs)

    def fits(self, inputs: int) -> bool:
        return inputs % (self.group_size or inputs) == 0


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """One linear layer's weight on its grid: what ships. `zeros_OG` is None where the grid is symmetric."""

    grid: IntegerGrid
    codes_OI: Tensor
    """int8."""
    scales_OG: Tensor
    """In the grid's scale dtype, finite and > 0."""
    zeros_OG: Tensor | None
    """int8."""

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values [O, I] as the runtime computes them: in the scales' dtype, then in `dtype`."""
        return dequantize(self.codes_OI, self.scales_OG, self.zeros_OG).to(dtype)


def dequantize(codes_OI: Tensor, scales_OG: Tensor, zeros_OG: Tensor | None) -> Tensor:
    """(code - zero) * scale, in the scales' dtype [O, I]."""
    outputs, inputs = codes_OI.shape
    codes_OGK = codes_OI.reshape(outputs, scales_OG.shape[1], -1).to(scales_OG.dtype)
    if zeros_OG is not None:
        codes_OGK = codes_OGK - zeros_OG[..., None].to(scales_OG.dtype)
    return (codes_OGK * scales_OG[..., None]).reshape(outputs, inputs)


def fit_grid(w_OI: Tensor, grid: IntegerGrid) -> tuple[Tensor, Tensor | None]:
    """Scales (in the grid's scale dtype) and zero points that span each group's own range, 0 included.

    Symmetric: max|w| is highest + 0.5 steps, so a step is 2 * max|w| / (2^b - 1): +max is clipped by half a step, -max
    rounds half a step outward. Asymmetric: from the smallest to the largest value. A group of zeros, or one whose step
    is too small for the scale dtype, gets the dtype's smallest normal scale.
    """
    outputs, inputs = w_OI.shape
    w_OGK = w_OI.float().reshape(outputs, grid.groups(inputs), -1)
    steps = (1 << grid.num_bits) - 1
    if grid.symmetric:
        scales_OG = usable_scales(2 * w_OGK.abs().amax(dim=-1) / steps, grid)
        return scales_OG, None
    low_OG, high_OG = w_OGK.amin(dim=-1).clamp(max=0), w_OGK.amax(dim=-1).clamp(min=0)
    scales_OG = usable_scales((high_OG - low_OG) / steps, grid)
    zeros_OG = (grid.lowest - low_OG / scales_OG.float()).round().clamp(grid.lowest, grid.highest)
    return scales_OG, zeros_OG.to(torch.int8)


def usable_scales(scales_OG: Tensor, grid: IntegerGrid) -> Tensor:
    """The scales in the grid's dtype, none below the dtype's smallest normal number."""
    tiny = torch.finfo(grid.scale_dtype).tiny
    return scales_OG.to(grid.scale_dtype).clamp(min=tiny)


def nearest_codes(w_OI: Tensor, scales_OG: Tensor, zeros_OG: Tensor | None, *, grid: IntegerGrid) -> Tensor:
    """The code of the nearest value on the grid, int8 [O, I]; ties go to the even code."""
    outputs, inputs = w_OI.shape
    w_OGK = w_OI.float().reshape(outputs, scales_OG.shape[1], -1)
    codes_OGK = w_OGK / scales_OG.float()[..., None]
    if zeros_OG is not None:
        codes_OGK = codes_OGK + zeros_OG.float()[..., None]
    return codes_OGK.round().clamp(grid.lowest, grid.highest).to(torch.int8).reshape(outputs, inputs)


def round_to_nearest(w_OI: Tensor, grid: IntegerGrid) -> QuantizedWeight:
    """The weight on the grid that `fit_grid` gives, each value by itself."""
    scales_OG, zeros_OG = fit_grid(w_OI, grid)
    return QuantizedWeight(grid, nearest_codes(w_OI, scales_OG, zeros_OG, grid=grid), scales_OG, zeros_OG)
