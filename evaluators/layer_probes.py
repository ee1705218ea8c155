"""Seeded random inputs for one layer, and how far two layers' outputs are apart.

Shapes: P probes, I inputs of a layer, V rows of an embedding, E experts.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from evaluators.stored_weights import NotComparable

PROBES = 16
ROWS = 4096
"""Of an embedding at a time; all of its rows are compared."""


class Products(nn.Module):
    """Stands in for a module whose parameter PEFT adapts directly: x @ w over the last two axes of that parameter."""

    def __init__(self, name: str, parameter: Tensor) -> None:
        super().__init__()
        self.name = name
        self.register_parameter(name, nn.Parameter(parameter, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        products: Tensor = x @ getattr(self, self.name)
        return products


def probes(layer: Any, *, seed: int, name: str, device: str) -> Iterator[Tensor]:
    """Inputs for `layer`, a plain module with its weights; equal for equal seed, name and shapes on every device."""
    generator = torch.Generator().manual_seed(_seed(seed, name))
    if isinstance(layer, nn.Embedding):
        for start in range(0, layer.num_embeddings, ROWS):
            yield torch.arange(start, min(start + ROWS, layer.num_embeddings), device=device)
    else:
        yield torch.randn(_input_shape(layer), generator=generator).to(device)


def difference(reference: Any, found: Any, inputs: Iterable[Tensor]) -> float:
    """|y - y'| / |y| over all inputs, summed in float64."""
    change = total = 0.0
    with torch.no_grad():
        for x in inputs:
            y, y_found = reference(x).double(), found(x).double()
            change += float((y - y_found).square().sum())
            total += float(y.square().sum())
    return _ratio(change, total)


def tensor_difference(expected: Tensor, found: Tensor) -> float:
    """|t - t'| / |t| of the expected tensor rounded once to the dtype of the one found."""
    rounded = expected.to(found.dtype).double()
    return _ratio(float((rounded - found.double()).square().sum()), float(rounded.square().sum()))


def _ratio(change: float, total: float) -> float:
    """Of square sums; 1 where something stands in the place of zeros, NaN where a value is no number."""
    if not math.isfinite(change + total):
        return math.nan
    return math.sqrt(change / total) if total else float(change > 0)


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little") >> 1


def _input_shape(layer: Any) -> tuple[int, ...]:
    """[P, I] for a matrix, [P, n] for a vector, [E, P, I] for fused experts; a small image for a convolution."""
    if isinstance(layer, Products):
        *experts, inputs, _ = getattr(layer, layer.name).shape
        return (*experts, PROBES, inputs)
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        reach = [d * (k - 1) for k, d in zip(layer.kernel_size, layer.dilation, strict=True)]
        return (2, layer.in_channels, *(size + 1 + 2 * step for size, step in zip(reach, layer.stride, strict=True)))
    if isinstance(layer, nn.Linear):
        return (PROBES, layer.in_features)
    weight = getattr(layer, "weight", None)
    if isinstance(layer, nn.MultiheadAttention) or not isinstance(weight, Tensor) or weight.ndim > 2:
        raise NotComparable(f"no random inputs are known for {type(layer).__name__}")
    return (PROBES, weight.shape[0])  # transformers' Conv1D keeps [I, O]; a norm's weight is a vector
