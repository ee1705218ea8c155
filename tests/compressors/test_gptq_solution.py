"""The laws of the whole solution, whatever grid and calibration inputs: finite, and never worse than rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compressors.gptq import SingularHessian
from compressors.gptq_solution import output_errors, solve, split_rows
from compressors.hessians import HessianSum
from compressors.integer_grid import IntegerGrid, QuantizedWeight, round_to_nearest
from modelpress.quantization_recipes import QuantizeWeights

GRIDS = {
    "symmetric 32": IntegerGrid(4, True, 32, torch.float32),
    "asymmetric 32": IntegerGrid(4, False, 32, torch.float32),
    "float16": IntegerGrid(4, True, 32, torch.float16),
    "bfloat16 asymmetric": IntegerGrid(4, False, 32, torch.bfloat16),
    "whole rows of 8 bits": IntegerGrid(8, True, None, torch.float32),
}
RECIPES = {
    "plain": {"clip_search": False, "refine_scales": False},
    "searched": {"clip_search": True, "refine_scales": False},
    "refined": {"clip_search": False, "refine_scales": True},
    "both": {},
}
KINDS = ("clean", "few tokens", "dead and twin inputs", "constant inputs")


def inputs_of(kind: str, *, inputs: int = 64) -> Tensor:
    """[N, I]."""
    x_NI = torch.randn(200, inputs, generator=torch.Generator().manual_seed(7)) * torch.linspace(0.1, 2, inputs)
    if kind == "few tokens":
        return x_NI[:12]
    if kind == "dead and twin inputs":
        x_NI[:, [3, 7]] = 0
        x_NI[:, 9] = x_NI[:, 8]
    if kind == "constant inputs":
        return x_NI[:1].expand(200, -1)
    return x_NI


def hessian_of(x_NI: Tensor) -> Tensor:
    total = HessianSum(x_NI.shape[1], device=x_NI.device)
    total.add(x_NI)
    return total.mean()


def weight_of(outputs: int = 24, inputs: int = 64) -> Tensor:
    """With a huge weight on an input that is dead in one of the kinds."""
    w_OI = 0.3 * torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(8))
    w_OI[5, 3] = 50.0
    return w_OI


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_no_row_is_worse_than_rounded(grid: IntegerGrid, recipe: dict[str, Any], kind: str) -> None:
    w_OI, h_II = weight_of(), hessian_of(inputs_of(kind))
    solution = solve(w_OI, h_II, grid=grid, arguments=QuantizeWeights(**recipe))
    rounded_O = output_errors(round_to_nearest(w_OI, grid), w_OI, h_II)
    chosen_O = output_errors(solution.weight, w_OI, h_II)
    assert (chosen_O <= rounded_O).all()
    assert chosen_O.sum() < rounded_O.sum()
    assert solution.weight.dequantized().isfinite().all()
    assert solution.weight.scales_OG.dtype == grid.scale_dtype


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_searching_ranges_and_solving_for_scales_each_help(grid: IntegerGrid) -> None:
    w_OI, h_II = weight_of(), hessian_of(inputs_of("clean"))
    errors = {
        name: float(output_errors(solve(w_OI, h_II, grid=grid, arguments=recipe).weight, w_OI, h_II).sum())
        for name, recipe in ((name, QuantizeWeights(**fields)) for name, fields in RECIPES.items())
    }
    assert errors["refined"] < errors["plain"]
    assert errors["both"] < errors["searched"]


def test_a_huge_weight_on_a_dead_input_does_not_coarsen_its_group() -> None:
    """Rounding's step in that group is 100 / 15; here it is that of the other weights."""
    w_OI, h_II = weight_of(), hessian_of(inputs_of("dead and twin inputs"))
    plain = QuantizeWeights(clip_search=False, refine_scales=False)
    solution = solve(w_OI, h_II, grid=GRIDS["symmetric 32"], arguments=plain)
    live_I = torch.arange(32) != 3
    expected = 2 * w_OI[5, :32][live_I & (torch.arange(32) != 7)].abs().max() / 15
    assert float(solution.weight.scales_OG[5, 0]) == pytest.approx(float(expected), rel=1e-6)
    assert int(solution.weight.codes_OI[5, 3]) == 7


def test_inputs_that_are_all_zero_tell_nothing() -> None:
    with pytest.raises(SingularHessian, match="all zero"):
        solve(weight_of(), torch.zeros(64, 64), grid=GRIDS["symmetric 32"], arguments=QuantizeWeights())


def test_stacked_weights_are_solved_as_each_by_itself() -> None:
    w_OI, h_II, recipe = weight_of(), hessian_of(inputs_of("clean")), QuantizeWeights()
    for grid in (GRIDS["symmetric 32"], GRIDS["asymmetric 32"]):
        stacked = solve(w_OI, h_II, grid=grid, arguments=recipe).weight
        parts = split_rows(stacked, {"q": 8, "k": 16})
        _assert_alike(parts["q"], solve(w_OI[:8], h_II, grid=grid, arguments=recipe).weight)
        _assert_alike(parts["k"], solve(w_OI[8:], h_II, grid=grid, arguments=recipe).weight)


def test_the_solution_is_the_same_each_time() -> None:
    w_OI, h_II, grid = weight_of(), hessian_of(inputs_of("few tokens")), GRIDS["asymmetric 32"]
    first, second = (solve(w_OI, h_II, grid=grid, arguments=QuantizeWeights()).weight for _ in range(2))
    assert torch.equal(first.codes_OI, second.codes_OI)
    assert torch.equal(first.scales_OG, second.scales_OG)


@pytest.mark.parametrize("inputs", [8, 500])
def test_the_hessian_is_the_mean_of_the_inputs_outer_products(inputs: int) -> None:
    """More inputs than a tile has; tokens in two portions."""
    x_NI = torch.randn(30, inputs, generator=torch.Generator().manual_seed(9))
    total = HessianSum(inputs, device=x_NI.device)
    total.add(x_NI[:11])
    total.add(x_NI[11:])
    assert total.tokens == 30
    torch.testing.assert_close(total.mean(), x_NI.t() @ x_NI / 30, rtol=1e-4, atol=1e-5)
    assert torch.equal(total.mean(), total.mean().t())


def _assert_alike(weight: QuantizedWeight, other: QuantizedWeight) -> None:
    """Sums of other shapes may differ in the last bit, and a code on the edge with them."""
    assert (weight.codes_OI == other.codes_OI).float().mean() > 0.99
    torch.testing.assert_close(weight.scales_OG, other.scales_OG, rtol=0.02, atol=1e-4)
