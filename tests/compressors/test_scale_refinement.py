"""Scales and codes chosen again: exact where it can be worked out, and never a higher output error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compressors.coordinate_descent import descend
from compressors.gptq_solution import output_errors
from compressors.integer_grid import IntegerGrid, QuantizedWeight, round_to_nearest
from compressors.scale_refinement import refine_scales

GRIDS = {
    "symmetric": IntegerGrid(4, True, 32, torch.float32),
    "asymmetric": IntegerGrid(4, False, 32, torch.float32),
    "bfloat16": IntegerGrid(4, True, 32, torch.bfloat16),
    "whole rows of 8 bits": IntegerGrid(8, True, None, torch.float32),
}
STEPS: dict[str, Callable[[QuantizedWeight, Tensor, Tensor], QuantizedWeight]] = {
    "scales": refine_scales,
    "codes": descend,
}


def weight_of(outputs: int = 16, inputs: int = 160) -> Tensor:
    """More inputs than a block of channels has, and no multiple of it."""
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))


def hessian_of(inputs: int = 160, *, tokens: int = 400) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x_NI = torch.randn(tokens, inputs, generator=generator) @ torch.randn(inputs, inputs, generator=generator)
    return x_NI.t() @ x_NI / tokens


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_no_row_gets_worse_and_all_together_get_better(
    step: Callable[[QuantizedWeight, Tensor, Tensor], QuantizedWeight], grid: IntegerGrid
) -> None:
    """bfloat16 products are rounded, so what is gained on paper may be lost by a hair."""
    w_OI, h_II = weight_of(), hessian_of()
    before = round_to_nearest(w_OI, grid)
    after = step(before, w_OI, h_II)
    old_O, new_O = output_errors(before, w_OI, h_II), output_errors(after, w_OI, h_II)
    assert (new_O <= old_O * (1.02 if grid.scale_dtype == torch.bfloat16 else 1 + 1e-5)).all()
    assert new_O.sum() < old_O.sum()
    assert after.scales_OG.dtype == grid.scale_dtype
    assert (after.scales_OG > 0).all()


def test_one_group_gets_the_least_squares_scale() -> None:
    """argmin over s of |X w - s X c|^2 = (X c . X w) / (X c . X c)."""
    grid = IntegerGrid(4, True, 4, torch.float32)
    x_NI = torch.randn(9, 4, generator=torch.Generator().manual_seed(2))
    w_OI, codes_OI = torch.tensor([[0.9, -2.1, 3.3, 6.2]]), torch.tensor([[1, -2, 3, 7]], dtype=torch.int8)
    weight = QuantizedWeight(grid, codes_OI, torch.ones(1, 1), None)
    refined = refine_scales(weight, w_OI, x_NI.t() @ x_NI)
    xc_N, xw_N = x_NI @ codes_OI[0].float(), x_NI @ w_OI[0]
    assert refined.scales_OG.item() == pytest.approx(float(xc_N @ xw_N / (xc_N @ xc_N)), rel=1e-5)
    assert torch.equal(refined.codes_OI, codes_OI)


def test_many_passes_reach_the_joint_least_squares_scales() -> None:
    """Three groups of 2: the normal equations of the columns X_g c_g, solved at once."""
    grid = IntegerGrid(4, True, 2, torch.float32)
    x_NI = torch.randn(40, 6, generator=torch.Generator().manual_seed(3))
    w_OI = torch.tensor([[3.2, -1.9, 1.1, 2.3, -4.4, 0.8]])
    weight = round_to_nearest(w_OI, grid)
    columns_NG = (x_NI * weight.codes_OI[0]).reshape(40, 3, 2).sum(dim=-1)
    expected_G = torch.linalg.lstsq(columns_NG, x_NI @ w_OI[0]).solution
    for _ in range(50):
        weight = refine_scales(weight, w_OI, x_NI.t() @ x_NI)
    torch.testing.assert_close(weight.scales_OG[0], expected_G, rtol=1e-4, atol=1e-5)


def test_the_zero_points_count_in_the_scale() -> None:
    """Values (code - zero) = 2, 4 stand for 1, 2 whatever H is: the scale is 0.5."""
    grid = IntegerGrid(4, False, 2, torch.float32)
    codes_OI, zeros_OG = torch.tensor([[3, 5]], dtype=torch.int8), torch.tensor([[1]], dtype=torch.int8)
    weight = QuantizedWeight(grid, codes_OI, torch.ones(1, 1), zeros_OG)
    refined = refine_scales(weight, torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 0.5], [0.5, 1.0]]))
    assert refined.scales_OG.item() == pytest.approx(0.5)
    assert refined.zeros_OG is zeros_OG


def test_a_scale_that_would_turn_negative_stays() -> None:
    weight = QuantizedWeight(
        IntegerGrid(4, True, 2, torch.float32), torch.tensor([[1, 1]], dtype=torch.int8), torch.ones(1, 1), None
    )
    refined = refine_scales(weight, torch.tensor([[-1.0, -1.0]]), torch.eye(2))
    assert refined.scales_OG.tolist() == [[1.0]]


def test_a_group_of_zeros_keeps_its_scale() -> None:
    weight = QuantizedWeight(
        IntegerGrid(4, True, 2, torch.float32), torch.zeros(1, 2, dtype=torch.int8), torch.ones(1, 1), None
    )
    assert refine_scales(weight, torch.tensor([[0.2, 0.1]]), torch.eye(2)).scales_OG.tolist() == [[1.0]]


def test_where_no_code_moves_every_code_is_the_best_given_the_others() -> None:
    """Tried by hand: no single code of the fixed point, moved anywhere on the grid, lowers the error."""
    grid = IntegerGrid(4, True, 3, torch.float32)
    w_OI, h_II = weight_of(4, 6), hessian_of(6, tokens=12)
    weight = round_to_nearest(w_OI, grid)
    for _ in range(20):
        weight = descend(weight, w_OI, h_II)
    assert torch.equal(descend(weight, w_OI, h_II).codes_OI, weight.codes_OI)
    reached_O = output_errors(weight, w_OI, h_II)
    for channel in range(6):
        for code in range(-8, 8):
            codes_OI = weight.codes_OI.clone()
            codes_OI[:, channel] = code
            moved = QuantizedWeight(grid, codes_OI, weight.scales_OG, None)
            assert (output_errors(moved, w_OI, h_II) >= reached_O * (1 - 1e-5)).all()


def test_codes_of_dead_channels_stay() -> None:
    w_OI, h_II = weight_of(4, 64), hessian_of(64)
    h_II[5] = h_II[:, 5] = 0
    before = round_to_nearest(w_OI, GRIDS["symmetric"])
    assert torch.equal(descend(before, w_OI, h_II).codes_OI[:, 5], before.codes_OI[:, 5])
