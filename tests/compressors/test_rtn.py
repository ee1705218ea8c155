"""Rounding to nearest: plain on a group's own range, clipped never with a larger error."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compressors.codebook_grid import CodebookGrid, CodebookWeight, round_to_codebook
from compressors.integer_grid import IntegerGrid, round_to_nearest
from compressors.layer_algorithms import LayerOutcome, LayerWork
from compressors.rtn import quantize_layer
from modelpress.quantization_recipes import QuantizeWeights

GRID = IntegerGrid(4, True, 32, torch.float32)


def outliers(seed: int) -> torch.Tensor:
    """Normal weights with one of 20 in each row."""
    w_OI = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
    w_OI[:, 5] = 20.0
    return w_OI


def quantized(w_OI: torch.Tensor, **fields: object) -> LayerOutcome:
    linear = nn.Linear(w_OI.shape[1], w_OI.shape[0], bias=False).requires_grad_(False)
    linear.weight.copy_(w_OI)
    work = LayerWork(
        name="layer",
        module=nn.ModuleDict({"a": linear}),
        linears={"a": linear},
        groups=(),
        inputs=None,
        arguments={},
        grid=GRID,
        device=torch.device("cpu"),
        seed=0,
    )
    return quantize_layer(work, QuantizeWeights(algorithm="rtn", group_size=32, **fields))


def error(outcome: LayerOutcome, w_OI: torch.Tensor) -> float:
    return float((outcome.weights["a"].dequantized() - w_OI).square().sum())


def test_without_a_search_weights_are_rounded_on_their_own_range():
    w_OI = outliers(0)
    weight, expected = quantized(w_OI, clip_search=False).weights["a"], round_to_nearest(w_OI, GRID)
    assert torch.equal(weight.codes_OI, expected.codes_OI) and torch.equal(weight.scales_OG, expected.scales_OG)


@pytest.mark.parametrize("seed", range(5))
def test_a_search_never_has_a_larger_error(seed: int):
    w_OI = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
    assert error(quantized(w_OI), w_OI) < error(quantized(w_OI, clip_search=False), w_OI)


@pytest.mark.parametrize("scheme", ["nf4", "fp4"])
def test_codebooks_are_rounded_on_their_own_range(scheme: str):
    w_OI = outliers(1)
    weight, expected = quantized(w_OI, scheme=scheme).weights["a"], round_to_codebook(w_OI, CodebookGrid(scheme, 32))
    assert isinstance(weight, CodebookWeight) and torch.equal(weight.codes_OI, expected.codes_OI)
