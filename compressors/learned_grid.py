"""Linear layers that compute on the grid that ships while their weights and steps are trained.

The straight-through estimator of Bengio et al. 2013 for the weights, and for each group's step the gradient of Esser et
al. 2019, "Learned Step Size Quantization". The zero points of an asymmetric grid stay.

Shapes: O outputs, I inputs, G groups along I, K = I / G inputs of a group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from compressors.codebook_grid import CodebookGrid, CodebookWeight, round_to_codebook
from compressors.integer_grid import IntegerGrid, QuantizedWeight, dequantize, nearest_codes, usable_scales
from compressors.weight_layouts import AnyWeight

LARGEST_RESIDUAL = 0.499
"""Steps between a code's value and the weight that is trained: less than what would be rounded to another code."""


class TrainedLinear(nn.Module):
    """A linear layer whose weight is that of `quantized()` in every forward pass."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self) -> None:
        super().__init__()
        self.held_OI: Tensor | None = None
        """The weight as it was rounded for several passes, see `rounded_once`."""

    def quantized(self) -> AnyWeight:
        """What ships of the layer as it is trained now."""
        raise NotImplementedError

    def on_grid(self) -> Tensor:
        """The dequantized weight [O, I], with a gradient to what is trained."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.on_grid() if self.held_OI is None else self.held_OI, self.bias)


class GridLinear(TrainedLinear):
    """On an integer grid. Trained are the weights and the groups' steps."""

    def __init__(self, linear: nn.Linear, start: QuantizedWeight) -> None:
        """Training starts with the codes of `start`; how far the float weight is from them is kept where it fits."""
        super().__init__()
        self.grid = start.grid
        exact_OI = dequantize(start.codes_OI, start.scales_OG.float(), start.zeros_OG)
        group_size = linear.in_features // start.scales_OG.shape[1]
        limit_OI = LARGEST_RESIDUAL * start.scales_OG.float().repeat_interleave(group_size, dim=1)
        residual_OI = (linear.weight.detach() - exact_OI).clamp(-limit_OI, limit_OI)
        self.weight = nn.Parameter(exact_OI + residual_OI)
        self.scales = nn.Parameter(start.scales_OG.float())
        self.bias = linear.bias
        self.zeros: Tensor | None
        self.register_buffer("zeros", start.zeros_OG, persistent=False)

    def quantized(self) -> QuantizedWeight:
        return _quantized(self.weight.detach(), self.scales.detach(), self.zeros, self.grid)

    def on_grid(self) -> Tensor:
        weight_OI: Tensor = _OnGrid.apply(self.weight, self.scales, self.zeros, self.grid)  # type: ignore[no-untyped-call]
        return weight_OI


class CodebookLinear(TrainedLinear):
    """On a codebook, each group at its range of now. Trained are the weights."""

    def __init__(self, linear: nn.Linear, start: CodebookWeight) -> None:
        super().__init__()
        self.grid = start.grid
        self.weight = nn.Parameter(linear.weight.detach().clone())
        self.bias = linear.bias

    def quantized(self) -> CodebookWeight:
        return round_to_codebook(self.weight.detach(), self.grid)

    def on_grid(self) -> Tensor:
        weight_OI: Tensor = _OnCodebook.apply(self.weight, self.grid)  # type: ignore[no-untyped-call]
        return weight_OI


@contextmanager
def rounded_once(layers: Collection[TrainedLinear]) -> Iterator[None]:
    """Round each weight once for all passes inside. What is trained gets its gradients, the sum over the passes, at the
    end.
    """
    with torch.enable_grad():
        values = [layer.on_grid() for layer in layers]
    for layer, value_OI in zip(layers, values, strict=True):
        layer.held_OI = value_OI.detach().requires_grad_(True)
    try:
        yield
        torch.autograd.backward(values, [layer.held_OI.grad for layer in layers if layer.held_OI is not None])
    finally:
        for layer in layers:
            layer.held_OI = None


def put_on_grid(model: nn.Module, weights: Mapping[str, AnyWeight]) -> dict[str, TrainedLinear]:
    """Put a layer that computes on the grid in the place of each of these linear layers of the model; nothing else of
    it will be trained.
    """
    model.requires_grad_(False)
    layers: dict[str, TrainedLinear] = {}
    for name, weight in weights.items():
        linear = cast(nn.Linear, model.get_submodule(name))
        layers[name] = (
            CodebookLinear(linear, weight) if isinstance(weight, CodebookWeight) else GridLinear(linear, weight)
        )
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layers[name])
    return layers


class _OnGrid(torch.autograd.Function):
    """The dequantized weight; its gradients as the module docstring says."""

    @staticmethod
    def forward(ctx: Any, w_OI: Tensor, scales_OG: Tensor, zeros_OG: Tensor | None, grid: IntegerGrid) -> Tensor:
        weight = _quantized(w_OI, scales_OG, zeros_OG, grid)
        ctx.save_for_backward(w_OI, weight.codes_OI, weight.scales_OG, zeros_OG)
        ctx.grid = grid
        return weight.dequantized()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None, None]:
        w_OI, codes_OI, scales_OG, zeros_OG = ctx.saved_tensors
        g_OGK = gradients[0].reshape(*scales_OG.shape, -1)
        zeros_OG1 = 0 if zeros_OG is None else zeros_OG[..., None].float()
        ratios_OGK = w_OI.reshape(g_OGK.shape) / scales_OG.float()[..., None]
        counts_OGK = codes_OI.reshape(g_OGK.shape).float() - zeros_OG1
        inside_OGK = (ratios_OGK - counts_OGK).abs() <= 0.5
        by_weight_OGK = torch.where(inside_OGK, g_OGK, 0)
        by_scale_OG = (g_OGK * counts_OGK - by_weight_OGK * ratios_OGK).sum(dim=-1)
        damped = (g_OGK.shape[-1] * ctx.grid.highest) ** -0.5
        return by_weight_OGK.reshape(w_OI.shape), by_scale_OG * damped, None, None


class _OnCodebook(torch.autograd.Function):
    """The dequantized weight; gradients pass straight through, for no value lies outside its group's range."""

    @staticmethod
    def forward(ctx: Any, w_OI: Tensor, grid: CodebookGrid) -> Tensor:
        return round_to_codebook(w_OI, grid).dequantized()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return gradients[0], None


def _quantized(w_OI: Tensor, scales_OG: Tensor, zeros_OG: Tensor | None, grid: IntegerGrid) -> QuantizedWeight:
    stored_OG = usable_scales(scales_OG, grid)
    return QuantizedWeight(grid, nearest_codes(w_OI, stored_OG, zeros_OG, grid=grid), stored_OG, zeros_OG)
