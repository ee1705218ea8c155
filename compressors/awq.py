"""Activation-aware scaling of weight channels: the mathematics of AWQ.

Lin et al. 2023, "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration". Input channels with
large activations matter most. Their weights are multiplied by s = mean|x|^a before they are rounded and their inputs
divided by it; the exponent a in [0, 1] is the one of a fixed list whose rounded weights change the output least.

Shapes: O outputs, of all linear layers that read the input together; I inputs; G groups along I.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compressors.channel_scaling import bounded
from compressors.integer_grid import IntegerGrid, QuantizedWeight, nearest_codes, round_to_nearest

EXPONENTS: tuple[float, ...] = tuple(step / 20 for step in range(20))
"""0, which is rounding as it is, 0.05 ... 0.95."""


@dataclass(frozen=True, eq=False)
class InputStatistics:
    """What the calibration inputs x_NI of a group of linear layers come to."""

    gram_II: Tensor
    """Sum over the tokens of x x^T."""
    mean_abs_I: Tensor

    def divided(self, scales_I: Tensor) -> InputStatistics:
        """Those of x / s."""
        return InputStatistics(self.gram_II / torch.outer(scales_I, scales_I), self.mean_abs_I / scales_I)


@dataclass(frozen=True, eq=False)
class ChosenScales:
    exponent: float
    scales_I: Tensor
    error: float
    """Squared output error of the rounded weights over all tokens."""


def scales_of(mean_abs_I: Tensor, exponent: float) -> Tensor:
    """mean|x|^exponent, its largest times its smallest value 1. Channels that are always 0 count as the smallest."""
    live_I = mean_abs_I[mean_abs_I > 0]
    if exponent == 0 or live_I.numel() == 0:
        return torch.ones_like(mean_abs_I)
    powers_I = mean_abs_I.clamp(min=live_I.min()).float().pow(exponent)
    return bounded(powers_I / (powers_I.max() * powers_I.min()).sqrt())


def output_error(change_OI: Tensor, gram_II: Tensor) -> float:
    """|(W' - W) X|^2 over the tokens that the Gram matrix sums up, from the change of the weights."""
    return float(((change_OI @ gram_II) * change_OI).sum(dtype=torch.float64))


def search_scales(
    w_OI: Tensor, statistics: InputStatistics, *, grid: IntegerGrid, possible: Callable[[Tensor], Tensor]
) -> ChosenScales:
    """The best of EXPONENTS by the output's error after rounding to nearest; never worse than scales of 1.

    `possible` gives the scales that can be undone nearest to those asked for. Of equal errors the smaller exponent is
    taken.
    """
    candidates = (_rounded(w_OI, statistics, grid=grid, exponent=exponent, possible=possible) for exponent in EXPONENTS)
    return min(candidates, key=lambda chosen: chosen.error)


def _rounded(
    w_OI: Tensor,
    statistics: InputStatistics,
    *,
    grid: IntegerGrid,
    exponent: float,
    possible: Callable[[Tensor], Tensor],
) -> ChosenScales:
    scales_I = scales_of(statistics.mean_abs_I, exponent)
    if exponent > 0:
        scales_I = possible(scales_I)
    rounded_OI = round_to_nearest(w_OI * scales_I, grid).dequantized() / scales_I
    return ChosenScales(exponent, scales_I, output_error(rounded_OI - w_OI, statistics.gram_II))


def best_rounding(
    w_OI: Tensor, gram_II: Tensor, *, grid: IntegerGrid, ranges: Sequence[tuple[Tensor, Tensor | None]]
) -> QuantizedWeight:
    """Round to nearest on each of these scales and zero points; the first of least output error."""
    rounded = [QuantizedWeight(grid, nearest_codes(w_OI, *pair, grid=grid), *pair) for pair in ranges]
    return min(rounded, key=lambda weight: output_error(weight.dequantized() - w_OI, gram_II))
