"""GPTQ's mathematics against its definition: one channel eliminated after the other, in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from compressors.gptq import BLOCK, FactoredHessian, SingularHessian, factor_hessian, quantize_channels
from compressors.integer_grid import IntegerGrid, QuantizedWeight, fit_grid, nearest_codes, round_to_nearest

GRID = IntegerGrid(4, True, 4, torch.float32)
ASYMMETRIC = IntegerGrid(4, False, 4, torch.float32)


def weight_of(outputs: int, inputs: int, *, seed: int = 0) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))


def hessian_of(inputs: int, *, tokens: int = 300, seed: int = 1) -> Tensor:
    """Of inputs that hang together and differ in size."""
    generator = torch.Generator().manual_seed(seed)
    mix_II = torch.randn(inputs, inputs, generator=generator) * torch.rand(inputs, generator=generator)
    x_NI = torch.randn(tokens, inputs, generator=generator) @ mix_II
    return x_NI.t() @ x_NI / tokens


def fitted(w_OI: Tensor, grid: IntegerGrid) -> tuple[Tensor, Tensor | None]:
    """As `fit_grid`, but the largest weight is not half-way between two codes."""
    scales_OG, zeros_OG = fit_grid(w_OI, grid)
    return 0.97 * scales_OG, zeros_OG


def quantized(w_OI: Tensor, hessian: FactoredHessian, grid: IntegerGrid) -> QuantizedWeight:
    scales_OG, zeros_OG = fitted(w_OI, grid)
    return quantize_channels(w_OI, hessian, grid=grid, scales_OG=scales_OG, zeros_OG=zeros_OG)


def nearest(w_OI: Tensor) -> Tensor:
    scales_OG, zeros_OG = fitted(w_OI, GRID)
    return nearest_codes(w_OI, scales_OG, zeros_OG, grid=GRID)


def by_elimination(w_OI: Tensor, h_II: Tensor, grid: IntegerGrid, *, damping: float) -> Tensor:
    """Codes by optimal brain quantization in a fixed order: what is left of H^-1 loses each channel when it is done."""
    scales_OG, zeros_OG = fitted(w_OI, grid)
    size = w_OI.shape[1] // scales_OG.shape[1]
    h_II = h_II.double()
    inverse_II = torch.linalg.inv(h_II + damping * h_II.diagonal().mean() * torch.eye(len(h_II)))
    rest_OI, codes_OI = w_OI.double().clone(), torch.zeros(w_OI.shape)
    for j in torch.argsort(h_II.diagonal(), descending=True).tolist():
        scale_O = scales_OG[:, j // size].double()
        zero_O = 0 if zeros_OG is None else zeros_OG[:, j // size].double()
        codes_OI[:, j] = (rest_OI[:, j] / scale_O + zero_O).round().clamp(grid.lowest, grid.highest)
        error_O = rest_OI[:, j] - (codes_OI[:, j] - zero_O) * scale_O
        rest_OI -= torch.outer(error_O / inverse_II[j, j], inverse_II[j])
        inverse_II = inverse_II - torch.outer(inverse_II[:, j], inverse_II[j]) / inverse_II[j, j]
        inverse_II[j, j] = torch.inf
    return codes_OI.to(torch.int8)


def error_of(weight: QuantizedWeight, w_OI: Tensor, h_II: Tensor) -> float:
    d_OI = w_OI - weight.dequantized()
    return float(((d_OI @ h_II) * d_OI).sum())


@pytest.mark.parametrize("grid", [GRID, ASYMMETRIC], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("inputs", [4, BLOCK, 2 * BLOCK + 4])
def test_blocks_change_nothing(grid: IntegerGrid, inputs: int) -> None:
    w_OI, h_II = weight_of(8, inputs), hessian_of(inputs)
    codes_OI = quantized(w_OI, factor_hessian(h_II, damping=0.01), grid).codes_OI
    assert torch.equal(codes_OI, by_elimination(w_OI, h_II, grid, damping=0.01))


def test_inputs_that_do_not_hang_together_are_rounded_to_nearest() -> None:
    w_OI, h_II = weight_of(6, 16), torch.diag(torch.linspace(1, 3, 16))
    codes_OI = quantized(w_OI, factor_hessian(h_II, damping=0.01), GRID).codes_OI
    assert torch.equal(codes_OI, nearest(w_OI))


def test_the_second_channel_takes_over_the_error_of_the_first() -> None:
    """Channel 0 is rounded from 0.4 to 0; channel 1 gets 0.4 * H_01 / H_11 = 0.3 on top of 0.3, and becomes 1."""
    grid = IntegerGrid(4, True, 2, torch.float32)
    hessian = factor_hessian(torch.tensor([[4.0, 2.25], [2.25, 3.0]]), damping=1e-9)
    w_OI = torch.tensor([[0.4, 0.3]])
    weight = quantize_channels(w_OI, hessian, grid=grid, scales_OG=torch.ones(1, 1), zeros_OG=None)
    assert weight.codes_OI.tolist() == [[0, 1]]


def test_a_small_problem_is_solved_better_than_by_rounding_and_never_beyond_the_best_codes() -> None:
    grid = IntegerGrid(4, True, 3, torch.float32)
    w_OI, h_II = weight_of(1, 3, seed=4), hessian_of(3, seed=5)
    scales_OG, _ = fitted(w_OI, grid)
    every = itertools.product(range(-8, 8), repeat=3)
    values_CI = torch.tensor(list(every)) * scales_OG
    best = float((((w_OI - values_CI) @ h_II) * (w_OI - values_CI)).sum(dim=1).min())
    chosen = error_of(quantized(w_OI, factor_hessian(h_II, damping=1e-6), grid), w_OI, h_II)
    assert best * (1 - 1e-5) <= chosen < error_of(round_to_nearest(w_OI, grid), w_OI, h_II)


@pytest.mark.parametrize("grid", [GRID, ASYMMETRIC], ids=["symmetric", "asymmetric"])
def test_gptq_lowers_the_output_error(grid: IntegerGrid) -> None:
    w_OI, h_II = weight_of(32, 128), hessian_of(128)
    chosen = error_of(quantized(w_OI, factor_hessian(h_II, damping=0.01), grid), w_OI, h_II)
    assert chosen < 0.8 * error_of(round_to_nearest(w_OI, grid), w_OI, h_II)


def test_a_dead_channel_is_rounded_by_itself_and_changes_no_other() -> None:
    w_OI, h_II = weight_of(4, 8), hessian_of(8)
    h_II[3] = h_II[:, 3] = 0
    scales_OG, _ = fitted(w_OI, GRID)
    live = [0, 1, 2, 4, 5, 6, 7]
    chosen = quantized(w_OI, factor_hessian(h_II, damping=0.01), GRID).codes_OI
    other_OI = w_OI.clone()
    other_OI[:, 3] = 0.1
    other = quantize_channels(
        other_OI, factor_hessian(h_II, damping=0.01), grid=GRID, scales_OG=scales_OG, zeros_OG=None
    )
    assert torch.equal(chosen[:, live], other.codes_OI[:, live])
    assert torch.equal(chosen[:, 3], nearest(w_OI)[:, 3])


def test_the_upper_factor_gives_the_inverse() -> None:
    h_II = hessian_of(12)
    hessian = factor_hessian(h_II, damping=0.01)
    inverse_II = torch.linalg.inv(h_II + 0.01 * h_II.diagonal().mean() * torch.eye(12))
    ordered_II = inverse_II[hessian.order_I][:, hessian.order_I]
    torch.testing.assert_close(hessian.upper_II.t() @ hessian.upper_II, ordered_II, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(hessian.importance(), 1 / inverse_II.diagonal(), rtol=1e-3, atol=1e-4)


def test_damping_is_raised_until_the_hessian_can_be_factored() -> None:
    """Its smallest eigenvalue is -0.5, so 0.01 and 0.1 do not help and 1 does."""
    assert factor_hessian(torch.tensor([[1.0, 1.5], [1.5, 1.0]]), damping=0.01).damping == pytest.approx(1.0)
    assert factor_hessian(torch.eye(2), damping=0.01).damping == 0.01


@pytest.mark.parametrize(
    ("h_II", "why"),
    [(torch.zeros(2, 2), "are all zero"), (torch.tensor([[1.0, 9.0], [9.0, 1.0]]), "singular even at a damping of 1")],
)
def test_a_hessian_that_tells_nothing_is_refused(h_II: Tensor, why: str) -> None:
    with pytest.raises(SingularHessian, match=why):
        factor_hessian(h_II, damping=0.01)
