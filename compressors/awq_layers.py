"""AWQ on one decoder layer: scale the channels group by group, then round every weight.

Scales are searched on what the layer computes before anything of it is rounded. A group whose input channels cannot be
scaled, as that of `o_proj` where queries are grouped, is rounded at scales of 1; its exponent in the details is 0.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from compressors.awq import InputStatistics, best_rounding, search_scales
from compressors.clipping import clipped_grid
from compressors.integer_grid import QuantizedWeight, fit_grid
from compressors.layer_algorithms import LayerOutcome, LayerWork
from compressors.layer_channels import (
    look_at_inputs,
    move_scales,
    possible_scales,
    scalable_channels,
    tensors_of,
)
from modelpress.quantization_recipes import QuantizeWeights


def quantize_layer(layer: LayerWork, arguments: QuantizeWeights) -> LayerOutcome:
    """Every linear layer of `layer`, whose module it changes; `clip_search` weighs errors by the inputs' squares.

    The details hold each group's exponent by its first linear layer.
    """
    statistics = input_statistics(layer)
    exponents = {group.linears[0]: 0.0 for group in layer.groups}
    moved: frozenset[str] = frozenset()
    for first, channels in scalable_channels(layer).items():
        chosen = search_scales(
            stacked_weights(layer, first),
            statistics[first],
            grid=layer.grid,
            possible=partial(possible_scales, layer, channels),
        )
        exponents[first] = chosen.exponent
        if chosen.exponent > 0:
            moved |= move_scales(layer, channels, chosen.scales_I)
            statistics[first] = statistics[first].divided(chosen.scales_I)
    targets = {f"{name}.weight" for name in layer.linears}
    return LayerOutcome(
        weights=_rounded(layer, statistics, arguments),
        changed=tensors_of(layer, moved - targets),
        rescaled=tensors_of(layer, moved & targets),
        details={f"awq exponent of {first}": exponent for first, exponent in exponents.items()},
    )


def stacked_weights(layer: LayerWork, first: str) -> Tensor:
    """The weights of the group that begins with that linear layer, one below the other."""
    (group,) = (group for group in layer.groups if group.linears[0] == first)
    return torch.cat([layer.linears[name].weight for name in group.linears])


def input_statistics(layer: LayerWork) -> dict[str, InputStatistics]:
    """Of each group's input over all calibration tokens, by the group's first linear layer."""
    sums = {
        group.linears[0]: _Sums(layer.linears[group.linears[0]].in_features, layer.device) for group in layer.groups
    }
    look_at_inputs(layer, {name: total.add for name, total in sums.items()})
    return {name: InputStatistics(total.gram_II, total.abs_I / total.tokens) for name, total in sums.items()}


class _Sums:
    """What is added up over the tokens."""

    def __init__(self, inputs: int, device: torch.device) -> None:
        self.gram_II = torch.zeros(inputs, inputs, device=device)
        self.abs_I = torch.zeros(inputs, device=device)
        self.tokens = 0

    def add(self, x_NI: Tensor) -> None:
        self.gram_II.addmm_(x_NI.t(), x_NI)
        self.abs_I += x_NI.abs().sum(dim=0)
        self.tokens += len(x_NI)


def _rounded(
    layer: LayerWork, statistics: dict[str, InputStatistics], arguments: QuantizeWeights
) -> dict[str, QuantizedWeight]:
    weights = {}
    for group in layer.groups:
        known = statistics[group.linears[0]]
        for name in group.linears:
            w_OI = layer.linears[name].weight.detach()
            ranges = [fit_grid(w_OI, layer.grid)]
            if arguments.clip_search:
                ranges.append(clipped_grid(w_OI, layer.grid, importance_I=known.gram_II.diagonal()))
            weights[name] = best_rounding(w_OI, known.gram_II, grid=layer.grid, ranges=ranges)
    return weights
