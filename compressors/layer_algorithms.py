"""What an algorithm of `quantize_weights` is given and gives back: one decoder layer at a time.

    quantized = LAYER_ALGORITHMS["gptq"](layer, arguments)

The layer is in memory, its inputs lie on disk. An algorithm may run the layer over its inputs as often as it wants,
and change `layer.module` while it works; what it returns decides what is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from compressors.codebook_grid import CodebookWeight
from compressors.compute_types import fastest_products
from compressors.decoder_families import LinearGroup
from compressors.integer_grid import IntegerGrid, QuantizedWeight
from modelpress.quantization_recipes import QuantizeWeights


class LayerInputs(Protocol):
    """The calibration windows as one decoder layer sees them; read from disk, as often as asked.

    Shapes: B windows, T tokens, H hidden width. Every window has T tokens; there is no padding.
    """

    def __len__(self) -> int:
        """Windows in all."""

    def batches(self, size: int) -> Iterator[Tensor]:
        """Hidden states [B, T, H] in float32 on the layer's device, B at most `size`, always in the same order."""

    def windows(self, indices: Tensor) -> Tensor:
        """The hidden states [B, T, H] of these windows."""


@dataclass(frozen=True, eq=False)
class LayerWork:
    """One decoder layer with everything that an algorithm needs.

    `linears` are the targets only, by their names inside the layer, e.g. `mlp.up_proj`; `groups` are the groups that
    hold at least one of them, cut to the targets. Where nothing is calibrated `inputs` is None.
    """

    name: str
    """e.g. `model.layers.3`."""
    module: nn.Module
    """In float32 on `device`, without gradients, in evaluation mode."""
    linears: Mapping[str, nn.Linear]
    groups: tuple[LinearGroup, ...]
    inputs: LayerInputs | None
    arguments: Mapping[str, Any]
    """Keyword arguments of the layer's forward pass beside the hidden states: positions, mask."""
    grid: IntegerGrid
    """Of a codebook scheme only its group size means something: the levels are the scheme's."""
    device: torch.device
    seed: int
    """Of this layer: it differs from layer to layer."""
    wanted: LayerInputs | None = None
    """The unquantized model's outputs of this layer, window by window; None unless the algorithm is one of
    `NEEDS_WANTED`."""

    def run(self, hidden_BTH: Tensor) -> Tensor:
        """The layer's output [B, T, H]."""
        return run_layer(self.module, hidden_BTH, self.arguments)


def run_layer(module: nn.Module, hidden_BTH: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """`layer_output` in float32, its products in the device's fastest type."""
    with fastest_products(hidden_BTH.device):
        return layer_output(module, hidden_BTH, arguments).float()


def layer_output(module: nn.Module, hidden_BTH: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """The output [B, T, H] of a decoder layer; `arguments` are the keyword arguments beside the hidden states."""
    out: Tensor | tuple[Tensor, ...] = module(hidden_BTH, **arguments)
    return out if isinstance(out, Tensor) else out[0]


@dataclass(frozen=True, eq=False)
class LayerOutcome:
    """What is stored of the layer. Linear layers that are not in `weights` stay as `changed`, or as the base has them.

    `weights` by the names of `LayerWork.linears`; `changed` are further float tensors of the layer by their names
    inside it, e.g. `input_layernorm.weight`, that must be stored anew in the base's dtype.
    """

    weights: Mapping[str, QuantizedWeight | CodebookWeight]
    changed: Mapping[str, Tensor] = field(default_factory=dict)
    rescaled: Mapping[str, Tensor] = field(default_factory=dict)
    """Where channels were scaled: the float tensors, by their names inside the layer, that `weights` were rounded from,
    e.g. `mlp.down_proj.weight`. The base's layer with `changed` and these computes what the base's layer computes; the
    errors in the record are measured against it."""
    fallbacks: Mapping[str, str] = field(default_factory=dict)
    """Linear layers that were quantized by rounding alone though the recipe says otherwise, and why."""
    details: Mapping[str, float] = field(default_factory=dict)
    """Figures of this layer for the record."""


class LayerAlgorithm(Protocol):
    def __call__(self, layer: LayerWork, arguments: QuantizeWeights) -> LayerOutcome: ...
