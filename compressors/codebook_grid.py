"""The grid of 4-bit weights whose levels are a table: NF4 and FP4, with a scale per group of input channels.

    weight = round_to_codebook(w_OI, CodebookGrid("nf4", group_size=64))
    weight.dequantized()                               # table[code] * absmax

NF4: Dettmers et al. 2023, "QLoRA", appendix E: the quantiles of a normal distribution, and 0. FP4: bitsandbytes' own
4-bit floating point. Both as bitsandbytes 0.50 computes them, code by code; the tables stand in `bitsandbytes_codes`.

Shapes: O outputs, I inputs, G groups along I; a group has I / G neighbouring inputs. Levels: 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from compressors.bitsandbytes_codes import CODES

SMALLEST_RANGE = 1e-38
"""Groups with a smaller range are scaled as if they had this one: its reciprocal is finite."""


@dataclass(frozen=True)
class CodebookGrid:
    name: Literal["nf4", "fp4"]
    group_size: int
    """Input channels that share a scale; blocks of the flattened weight, as bitsandbytes counts, where it divides I."""

    @property
    def num_bits(self) -> int:
        return 4

    @property
    def table(self) -> Tensor:
        """What each of the 16 codes stands for where the largest magnitude is 1, in float32."""
        return torch.tensor(CODES[self.name])

    def groups(self, inputs: int) -> int:
        """G of a weight with so many inputs, which `group_size` must divide."""
        return inputs // self.group_size

    def fits(self, inputs: int) -> bool:
        return inputs % self.group_size == 0


@dataclass(frozen=True, eq=False)
class CodebookWeight:
    """One linear layer's weight on its grid: what ships."""

    grid: CodebookGrid
    codes_OI: Tensor
    """uint8, 0 to 15."""
    absmax_OG: Tensor
    """float32, finite and >= 0; 0 for a group of zeros."""

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values [O, I] as the runtime computes them: in float32, then in `dtype`."""
        return decode(self.codes_OI, self.absmax_OG, grid=self.grid).to(dtype)


def decode(codes_OI: Tensor, absmax_OG: Tensor, *, grid: CodebookGrid) -> Tensor:
    """table[code] * absmax in float32 [O, I]. A group of zeros is exactly 0, whatever its codes."""
    outputs, inputs = codes_OI.shape
    levels_OGK = grid.table.to(codes_OI.device)[codes_OI.int()].reshape(outputs, absmax_OG.shape[1], -1)
    return (levels_OGK * absmax_OG[..., None]).reshape(outputs, inputs)


def group_ranges(w_OI: Tensor, grid: CodebookGrid) -> Tensor:
    """The largest magnitude of each group, float32 [O, G]."""
    outputs, inputs = w_OI.shape
    return w_OI.float().reshape(outputs, grid.groups(inputs), -1).abs().amax(dim=-1)


def nearest_levels(w_OI: Tensor, absmax_OG: Tensor, *, grid: CodebookGrid) -> Tensor:
    """The code of the nearest level, uint8 [O, I]; a value in the middle of two gets the lower one.

    Values are scaled by the reciprocal of the range, as bitsandbytes does: a division would round otherwise.
    """
    outputs, inputs = w_OI.shape
    order = torch.argsort(grid.table, stable=True).to(w_OI.device)
    sorted_levels = grid.table.to(w_OI.device)[order]
    midpoints = (sorted_levels[:-1] + sorted_levels[1:]) / 2
    w_OGK = w_OI.float().reshape(outputs, absmax_OG.shape[1], -1)
    scaled_OGK = (w_OGK * (1 / absmax_OG.clamp(min=SMALLEST_RANGE))[..., None]).clamp(-1, 1)
    return order[torch.bucketize(scaled_OGK, midpoints)].to(torch.uint8).reshape(outputs, inputs)


def round_to_codebook(w_OI: Tensor, grid: CodebookGrid) -> CodebookWeight:
    """The weight on the grid of its groups' own ranges, each value by itself."""
    absmax_OG = group_ranges(w_OI, grid)
    return CodebookWeight(grid, nearest_levels(w_OI, absmax_OG, grid=grid), absmax_OG)
