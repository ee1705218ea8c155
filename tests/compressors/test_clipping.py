"""The range of each group is the best of the listed ones, by the error that counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compressors.clipping import FACTORS, clipped_grid
from compressors.integer_grid import IntegerGrid, QuantizedWeight, dequantize, fit_grid, nearest_codes

GRIDS = {
    "symmetric": IntegerGrid(4, True, 8, torch.float32),
    "asymmetric": IntegerGrid(4, False, 8, torch.float32),
    "bfloat16": IntegerGrid(4, True, 8, torch.bfloat16),
    "whole rows of 8 bits": IntegerGrid(8, True, None, torch.float32),
}
IMPORTANCE_I = torch.linspace(0.1, 3, 32)


def weight_of(outputs: int = 80, inputs: int = 32) -> Tensor:
    """With outliers; more rows than are searched at a time."""
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)) ** 3


def errors(w_OI: Tensor, scales_OG: Tensor, zeros_OG: Tensor | None, *, grid: IntegerGrid, by_I: Tensor) -> Tensor:
    """[O, G]."""
    weight = QuantizedWeight(grid, nearest_codes(w_OI, scales_OG, zeros_OG, grid=grid), scales_OG, zeros_OG)
    return ((w_OI - weight.dequantized()) ** 2 * by_I).reshape(*scales_OG.shape, -1).sum(dim=-1)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_each_group_has_the_factor_with_the_smallest_weighted_error(grid: IntegerGrid) -> None:
    w_OI = weight_of()
    scales_OG, zeros_OG = clipped_grid(w_OI, grid, importance_I=IMPORTANCE_I)
    full_OG, full_zeros_OG = fit_grid(w_OI, grid)
    tried_FOG = torch.stack([(full_OG.float() * factor).to(grid.scale_dtype) for factor in FACTORS])
    errors_FOG = torch.stack([errors(w_OI, s, full_zeros_OG, grid=grid, by_I=IMPORTANCE_I) for s in tried_FOG])
    expected_OG = tried_FOG.gather(0, errors_FOG.min(dim=0).indices[None])[0]
    assert torch.equal(scales_OG, expected_OG)
    if zeros_OG is None or full_zeros_OG is None:
        assert zeros_OG is full_zeros_OG
    else:
        assert torch.equal(zeros_OG, full_zeros_OG)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_no_group_has_a_larger_error_than_on_its_full_range(grid: IntegerGrid) -> None:
    w_OI, ones_I = weight_of(), torch.ones(32)
    searched = errors(w_OI, *clipped_grid(w_OI, grid, importance_I=None), grid=grid, by_I=ones_I)
    full = errors(w_OI, *fit_grid(w_OI, grid), grid=grid, by_I=ones_I)
    assert (searched <= full).all()
    assert grid.num_bits == 8 or searched.sum() < 0.97 * full.sum()


def test_weights_that_lie_on_the_grid_keep_their_range() -> None:
    """Codes -7 ... 7 in steps of 0.5, and one of -7.5 steps that spans the range."""
    grid = IntegerGrid(4, True, 16, torch.float32)
    w_OI = torch.cat([torch.arange(-7, 8) * 0.5, torch.tensor([-3.75])])[None]
    scales_OG, _ = clipped_grid(w_OI, grid, importance_I=None)
    assert scales_OG.tolist() == [[0.5]]


def test_all_alike_is_what_no_importance_means() -> None:
    grid = GRIDS["symmetric"]
    without, _ = clipped_grid(weight_of(), grid, importance_I=None)
    alike, _ = clipped_grid(weight_of(), grid, importance_I=torch.full((32,), 4.0))
    assert torch.equal(without, alike)


def test_inputs_of_no_importance_do_not_widen_the_range() -> None:
    grid = IntegerGrid(4, True, 4, torch.float32)
    w_OI = torch.tensor([[0.75, -0.5, 0.25, 50.0]])
    scales_OG, _ = clipped_grid(w_OI, grid, importance_I=torch.tensor([1.0, 1.0, 1.0, 0.0]))
    assert scales_OG.item() < 0.11


def test_a_group_of_no_importance_is_fitted_as_if_all_its_inputs_were_alike() -> None:
    grid = GRIDS["symmetric"]
    w_OI = weight_of(inputs=16)
    scales_OG, _ = clipped_grid(w_OI, grid, importance_I=torch.tensor([0.0] * 8 + [3.0] * 8))
    alike_OG, _ = clipped_grid(w_OI, grid, importance_I=None)
    assert torch.equal(scales_OG, alike_OG)


def test_a_weight_of_zeros_stays_zero() -> None:
    grid = GRIDS["symmetric"]
    scales_OG, zeros_OG = clipped_grid(torch.zeros(2, 8), grid, importance_I=None)
    codes_OI = nearest_codes(torch.zeros(2, 8), scales_OG, zeros_OG, grid=grid)
    assert (scales_OG > 0).all()
    assert not dequantize(codes_OI, scales_OG, zeros_OG).any()
