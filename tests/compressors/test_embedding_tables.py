import pytest
import torch

from compressors.embedding_tables import quantize_rows, snap_tables
from modelpress.errors import InvalidModel


def test_codes_and_scales_are_those_worked_out_by_hand() -> None:
    table = quantize_rows(torch.tensor([[1.27, -0.635, 0.004], [-2.54, 0.03, 0.0]]))
    assert table.codes.tolist() == [[127, -64, 0], [-127, 2, 0]]
    torch.testing.assert_close(table.scales, torch.tensor([0.01, 0.02]))


def test_no_element_moves_by_more_than_half_a_step() -> None:
    table_VH = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    table = quantize_rows(table_VH)
    assert ((table.dequantize() - table_VH).abs() <= 0.5001 * table.scales[:, None]).all()


@pytest.mark.parametrize("value", [0.0, 1e-40, -3.0])
def test_degenerate_rows_get_finite_scales_and_a_zero_row_stays_zero(value: float) -> None:
    table = quantize_rows(torch.full((1, 4), value))
    assert torch.isfinite(table.scales).all() and (table.scales > 0).all()
    assert table.dequantize().tolist()[0] == pytest.approx([value] * 4, rel=1 / 127, abs=1e-38)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_table_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(InvalidModel, match="NaN or infinite"):
        quantize_rows(torch.tensor([[1.0, value]]))


def test_snapped_tables_hold_what_a_lookup_gives_and_stay_frozen() -> None:
    model = torch.nn.ModuleDict({"words": torch.nn.Embedding(5, 3), "left": torch.nn.Embedding(5, 3)})
    before = model["left"].weight.clone()
    tables = snap_tables(model, ["words"])
    assert torch.equal(model["words"].weight, tables["words"].dequantize())
    assert not model["words"].weight.requires_grad
    assert torch.equal(model["left"].weight, before) and model["left"].weight.requires_grad
