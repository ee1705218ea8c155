"""NF4 and FP4: the nearest level of the table, exact round trips, and rows that have nothing to scale by."""

from __future__ import annotations

import pytest
import torch

from compressors.bitsandbytes_codes import CODES
from compressors.codebook_grid import CodebookGrid, CodebookWeight, round_to_codebook

GRIDS = [CodebookGrid(name, size) for name in ("nf4", "fp4") for size in (32, 64, 128)]


def drawn(seed: int, outputs: int = 6, inputs: int = 256) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_value_goes_to_the_nearest_level(grid: CodebookGrid, seed: int) -> None:
    w_OI = drawn(seed)
    weight = round_to_codebook(w_OI, grid)

    absmax = w_OI.reshape(6, -1, grid.group_size).abs().amax(dim=-1)
    assert torch.equal(weight.absmax_OG, absmax)
    assert weight.codes_OI.dtype == torch.uint8
    levels = torch.tensor(CODES[grid.name]) * absmax.repeat_interleave(grid.group_size, dim=1)[..., None]
    error = (levels - w_OI[..., None]).abs().amin(dim=-1)
    torch.testing.assert_close((weight.dequantized() - w_OI).abs(), error, rtol=0, atol=1e-6)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_what_lies_on_the_grid_stays(grid: CodebookGrid) -> None:
    values = round_to_codebook(drawn(7), grid).dequantized()

    again = round_to_codebook(values, grid)

    assert torch.equal(again.dequantized(), values)


def test_a_value_in_the_middle_of_two_levels_gets_the_lower_one() -> None:
    low, high = CODES["nf4"][8:10]
    w_OI = torch.zeros(1, 32)
    w_OI[0, :2] = torch.tensor([1.0, (low + high) / 2])

    assert round_to_codebook(w_OI, CodebookGrid("nf4", 32)).codes_OI[0, :3].tolist() == [15, 8, 7]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_rows_of_zeros_are_exactly_zero_and_tiny_rows_stay_finite(grid: CodebookGrid) -> None:
    """Case 24: a group of zeros has range 0, a subnormal one a range whose reciprocal is infinite."""
    w_OI = drawn(3)
    w_OI[0] = 0
    w_OI[1] *= 1e-42
    w_OI[2] *= 1e-38

    weight = round_to_codebook(w_OI, grid)

    values = weight.dequantized()
    assert torch.count_nonzero(values[0]) == 0
    assert values.isfinite().all()
    assert (values[1:3].abs() <= w_OI[1:3].abs().amax(dim=1, keepdim=True)).all()


def test_a_grid_knows_which_inputs_it_divides() -> None:
    grid = CodebookGrid("nf4", 64)
    assert (grid.fits(128), grid.fits(96), grid.groups(128), grid.num_bits) == (True, False, 2, 4)


def test_values_are_computed_in_float32_and_rounded_once() -> None:
    weight = CodebookWeight(CodebookGrid("nf4", 2), torch.tensor([[6, 15]]).to(torch.uint8), torch.tensor([[1 / 3]]))
    expected = (torch.tensor([[CODES["nf4"][6], 1.0]]) * torch.tensor(1 / 3)).bfloat16()
    assert torch.equal(weight.dequantized(torch.bfloat16), expected)
