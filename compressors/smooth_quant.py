"""SmoothQuant: move outliers of the activations into the weights, so that 8-bit activations lose less.

Xiao et al. 2022, "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models". Channel j
of the inputs that a norm makes is divided by max|x_j|^a / max|w_j|^(1 - a), and the weights that read it multiplied; a
is the migration strength, 1 moves all of an outlier.

Shapes: I input channels, O outputs of all linear layers that read them, N tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from compressors.channel_scaling import bounded
from compressors.layer_algorithms import LayerWork
from compressors.layer_channels import (
    Channels,
    look_at_inputs,
    move_scales,
    possible_scales,
    scalable_channels,
    tensors_of,
)
from modelpress.quantization_recipes import QuantizeWeights

SMALLEST = 1e-5
"""Maxima are taken to be at least that."""


def smoothing_scales(max_x_I: Tensor, max_w_I: Tensor, *, strength: float) -> Tensor:
    """max|x|^a / max|w|^(1 - a) within the bounds of `bounded`; 1 for a channel without inputs or without weights."""
    x_I, w_I = max_x_I.clamp(min=SMALLEST), max_w_I.clamp(min=SMALLEST)
    scales_I = bounded(x_I.pow(strength) / w_I.pow(1 - strength))
    return torch.where((max_x_I > 0) & (max_w_I > 0), scales_I, torch.ones_like(scales_I))


def smooth_layer(layer: LayerWork, arguments: QuantizeWeights) -> Mapping[str, Tensor]:
    """Smooth the groups whose input a norm makes, in `layer.module` itself, before its weights are rounded.

    Returns every tensor that changed by its name inside the layer: the norms, and the weights that read them. The
    layer computes what it did before. Where the recipe asks for no smoothing nothing changes.
    """
    if arguments.smooth_quant is None:
        return {}
    normed = {
        first: channels
        for first, channels in scalable_channels(layer).items()
        if not isinstance(layer.module.get_submodule(channels.source), nn.Linear)
    }
    maxima = {first: _Maximum(layer.linears[first].in_features, layer.device) for first in normed}
    look_at_inputs(layer, {first: maximum.add for first, maximum in maxima.items()})
    moved: frozenset[str] = frozenset()
    for first, channels in normed.items():
        asked_I = smoothing_scales(
            maxima[first].abs_I, largest_weights(layer, channels), strength=arguments.smooth_quant
        )
        moved |= move_scales(layer, channels, possible_scales(layer, channels, asked_I))
    return tensors_of(layer, moved)


def largest_weights(layer: LayerWork, channels: Channels) -> Tensor:
    """max|w| [I] over all that reads each channel."""
    weights: list[Tensor] = [layer.module.get_parameter(f"{name}.weight") for name in channels.readers]
    return torch.cat(weights).abs().amax(dim=0)


class _Maximum:
    """The largest magnitude of each channel."""

    def __init__(self, inputs: int, device: torch.device) -> None:
        self.abs_I = torch.zeros(inputs, device=device)

    def add(self, x_NI: Tensor) -> None:
        self.abs_I = torch.maximum(self.abs_I, x_NI.abs().amax(dim=0))
