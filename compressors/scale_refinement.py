"""Solve for the scales again once the codes are chosen.

With codes and zero points fixed, the layer's squared output error tr(D H D^T), D = W - Q, is a quadratic of the
scales. Along the scale of one group its minimum is known in closed form; the groups are visited in order (coordinate
descent), as in Kim et al. 2026, "Two-Stage Grid Optimization for Group-wise Quantization of LLMs" (arXiv:2602.02126).

Shapes: O outputs, I inputs, G groups along I, K inputs of a group. `slope_IO` is (D H)^T.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressors.integer_grid import QuantizedWeight, usable_scales


def refine_scales(weight: QuantizedWeight, w_OI: Tensor, h_II: Tensor) -> QuantizedWeight:
    """One pass over all groups: each scale at the minimum of tr(D H D^T) along it, rounded to the grid's scale dtype.

    Up to that rounding, and float32's, the minimum is exact. A scale that would leave the positive numbers, or that
    rounding to its dtype makes worse than before, stays.
    """
    inputs, size = w_OI.shape[1], w_OI.shape[1] // weight.scales_OG.shape[1]
    counts_IO = _counts(weight).t().contiguous()
    slope_IO = h_II @ (w_OI.float() - weight.dequantized()).t()
    scales_GO = torch.empty_like(weight.scales_OG.t())
    for group, start in enumerate(range(0, inputs, size)):
        counts_KO, h_KI = counts_IO[start : start + size], h_II[start : start + size]
        pull_O = (counts_KO * slope_IO[start : start + size]).sum(dim=0)
        curvature_O = (counts_KO * (h_KI[:, start : start + size] @ counts_KO)).sum(dim=0)
        old_O = weight.scales_OG[:, group]
        new_O = old_O.float() + torch.where(curvature_O > 0, pull_O / curvature_O, 0)
        stored_O = usable_scales(new_O, weight.grid)
        move_O = stored_O.float() - old_O.float()
        lower_O = (new_O > 0) & (move_O * (move_O * curvature_O - 2 * pull_O) < 0)
        scales_GO[group] = torch.where(lower_O, stored_O, old_O)
        slope_IO.addmm_(h_KI.t(), counts_KO * torch.where(lower_O, move_O, 0), alpha=-1)
    return QuantizedWeight(weight.grid, weight.codes_OI, scales_GO.t().contiguous(), weight.zeros_OG)


def _counts(weight: QuantizedWeight) -> Tensor:
    """code - zero point, in float32 [O, I]: how many steps each value is from 0."""
    counts_OI = weight.codes_OI.float()
    if weight.zeros_OG is None:
        return counts_OI
    zeros_OG = weight.zeros_OG.float()
    return counts_OI - zeros_OG.repeat_interleave(counts_OI.shape[1] // zeros_OG.shape[1], dim=1)
