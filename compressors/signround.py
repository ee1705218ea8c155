"""Learned rounding: the mathematics of SignRound, as AutoRound carries it out.

Cheng et al. 2023, "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs". A weight's code
is round(w / s + v) with a learned offset v in [-1/2, 1/2], and the ends of each group's range are learned as shares of
its own ends. Rounding lets gradients straight through, and only their signs move what is learned.

    problem = rounding_problem(w_OI, grid)
    learned = problem.start()
    rounded = problem.rounded(learned)
    ...                                             # g_OI = d loss / d rounded.weight.dequantized()
    learned.descend(problem.gradients(g_OI, rounded), rate=0.01)

Shapes: O outputs, I inputs, G groups along I, K = I / G inputs of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compressors.integer_grid import IntegerGrid, QuantizedWeight, usable_scales

OFFSETS = (-0.5, 0.5)
SHARES = (0.5, 1.25)
"""Bounds of what is learned. A range may grow: that of a symmetric grid ends half a step short of its outlier."""


@dataclass(frozen=True, eq=False)
class Learned:
    """What is learned of one weight, or the gradients of that: offsets, and shares of each group's low and high end.

    A symmetric grid has one range, whose share is `high_OG`; its `low_OG` is not read.
    """

    offsets_OI: Tensor
    low_OG: Tensor
    high_OG: Tensor

    def clone(self) -> Learned:
        return Learned(self.offsets_OI.clone(), self.low_OG.clone(), self.high_OG.clone())

    def descend(self, gradients: Learned, *, rate: float) -> None:
        """One step, in place, against the gradients' signs."""
        self.offsets_OI.sub_(gradients.offsets_OI.sign(), alpha=rate).clamp_(*OFFSETS)
        self.low_OG.sub_(gradients.low_OG.sign(), alpha=rate).clamp_(*SHARES)
        self.high_OG.sub_(gradients.high_OG.sign(), alpha=rate).clamp_(*SHARES)


@dataclass(frozen=True, eq=False)
class Rounded:
    """A weight on the grid as it ships, with what its gradients need: w / s, its codes before they were clipped, its
    zero points before they were rounded.
    """

    weight: QuantizedWeight
    ratios_OGK: Tensor
    unclipped_OGK: Tensor
    unrounded_OG: Tensor | None


@dataclass(frozen=True, eq=False)
class RoundingProblem:
    """One weight in float32, grouped, with the lowest and the highest value of each group, 0 included. On a symmetric
    grid these are minus and plus the largest magnitude.
    """

    grid: IntegerGrid
    w_OGK: Tensor
    low_OG: Tensor
    high_OG: Tensor

    def start(self) -> Learned:
        """What makes `rounded` the same as `round_to_nearest`."""
        offsets_OI = torch.zeros_like(self.w_OGK).flatten(1)
        return Learned(offsets_OI, torch.ones_like(self.low_OG), torch.ones_like(self.high_OG))

    def rounded(self, learned: Learned) -> Rounded:
        scales_OG, unrounded_OG = self._grid_of(learned)
        zeros_OG = None
        ratios_OGK = self.w_OGK / scales_OG.float()[..., None]
        unclipped_OGK = ratios_OGK + learned.offsets_OI.view_as(ratios_OGK)
        if unrounded_OG is not None:
            rounded_OG = unrounded_OG.round().clamp(self.grid.lowest, self.grid.highest)
            unclipped_OGK += rounded_OG[..., None]
            zeros_OG = rounded_OG.to(torch.int8)
        unclipped_OGK.round_()
        codes_OI = unclipped_OGK.clamp(self.grid.lowest, self.grid.highest).to(torch.int8).flatten(1)
        weight = QuantizedWeight(self.grid, codes_OI, scales_OG, zeros_OG)
        return Rounded(weight, ratios_OGK, unclipped_OGK, unrounded_OG)

    def gradients(self, g_OI: Tensor, rounded: Rounded) -> Learned:
        """Of the loss by what was learned, from g_OI, its gradient by the weight `rounded` stands for.

        q = s (clip(round(w / s + v) + z) - z) with z = round(lowest - low / s), s = (high - low) / (2^b - 1), and
        round' = 1. Where nothing is clipped dq/dv = s, dq/ds = code - z - w / s and dq/dlow = 0; where the code is
        clipped dq/dv = 0, dq/ds = code - z - low / s and dq/dlow = 1. On a symmetric grid z is 0, and where the code is
        clipped dq/ds is that code.
        """
        g_OGK = g_OI.reshape(rounded.ratios_OGK.shape)
        codes_OGK = rounded.weight.codes_OI.view_as(g_OGK).float()
        kept_OGK = torch.where(rounded.unclipped_OGK == codes_OGK, g_OGK, 0)
        scales_OG, zeros_OG = rounded.weight.scales_OG.float(), rounded.weight.zeros_OG
        by_scale_OG = (g_OGK * codes_OGK).sum(dim=-1) - (kept_OGK * rounded.ratios_OGK).sum(dim=-1)
        offsets_OI = (kept_OGK * scales_OG[..., None]).flatten(1)
        steps = (1 << self.grid.num_bits) - 1
        if zeros_OG is None or rounded.unrounded_OG is None:
            return Learned(offsets_OI, torch.zeros_like(by_scale_OG), by_scale_OG * 2 * self.high_OG / steps)
        clipped_OG = (g_OGK - kept_OGK).sum(dim=-1)
        by_scale_OG -= g_OGK.sum(dim=-1) * zeros_OG.float() + clipped_OG * (self.grid.lowest - rounded.unrounded_OG)
        by_low_OG = self.low_OG * (clipped_OG - by_scale_OG / steps)
        return Learned(offsets_OI, by_low_OG, by_scale_OG * self.high_OG / steps)

    def _grid_of(self, learned: Learned) -> tuple[Tensor, Tensor | None]:
        """Scales in the grid's dtype, and zero points before they are rounded; computed as `fit_grid` does."""
        steps = (1 << self.grid.num_bits) - 1
        high_OG = self.high_OG * learned.high_OG
        if self.grid.symmetric:
            return usable_scales(2 * high_OG / steps, self.grid), None
        low_OG = self.low_OG * learned.low_OG
        scales_OG = usable_scales((high_OG - low_OG) / steps, self.grid)
        return scales_OG, self.grid.lowest - low_OG / scales_OG.float()


def rounding_problem(w_OI: Tensor, grid: IntegerGrid) -> RoundingProblem:
    """`grid.fits` must hold of the weight."""
    w_OGK = w_OI.float().reshape(w_OI.shape[0], grid.groups(w_OI.shape[1]), -1)
    if grid.symmetric:
        high_OG = w_OGK.abs().amax(dim=-1)
        return RoundingProblem(grid, w_OGK, -high_OG, high_OG)
    return RoundingProblem(grid, w_OGK, w_OGK.amin(dim=-1).clamp(max=0), w_OGK.amax(dim=-1).clamp(min=0))
