"""Hidden states on disk are those that were written, in whatever batches they are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compressors.activations import BATCH_TOKENS, Activations, NonFiniteError, batch_windows
from modelpress.errors import InternalError

CPU = torch.device("cpu")
WINDOWS, TOKENS, WIDTH = 7, 3, 4
TABLE_VH = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(0))
IDS_NT = torch.randint(0, 20, (WINDOWS, TOKENS), generator=torch.Generator().manual_seed(1))


def embedded(root: Path) -> Activations:
    return Activations.embed(IDS_NT, lambda ids_BT: TABLE_VH[ids_BT], path=root / "0", device=CPU)


@pytest.mark.parametrize("size", [1, 2, 7, 50])
def test_batches_of_any_size_are_the_windows_in_their_order(tmp_path: Path, size: int):
    batches = list(embedded(tmp_path).batches(size))
    assert [len(batch) for batch in batches[:-1]] == [size] * (len(batches) - 1)
    assert torch.equal(torch.cat(batches), TABLE_VH[IDS_NT])


def test_windows_are_read_by_their_numbers(tmp_path: Path):
    wanted = torch.tensor([5, 0, 5])
    assert torch.equal(embedded(tmp_path).windows(wanted), TABLE_VH[IDS_NT[wanted]])


def test_outputs_take_the_inputs_place_on_disk(tmp_path: Path):
    outputs = embedded(tmp_path).through(lambda hidden_BTH: 2 * hidden_BTH, path=tmp_path / "1")
    assert torch.equal(next(outputs.batches(WINDOWS)), 2 * TABLE_VH[IDS_NT])
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert (tmp_path / "1").stat().st_size == WINDOWS * TOKENS * WIDTH * 4


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, value: float):
    with pytest.raises(NonFiniteError):
        embedded(tmp_path).through(lambda hidden_BTH: hidden_BTH * value, path=tmp_path / "1")


def test_a_batch_has_a_bounded_number_of_tokens_and_one_window_at_least():
    assert batch_windows(512) * 512 == BATCH_TOKENS
    assert batch_windows(2 * BATCH_TOKENS) == 1


def test_a_file_that_was_cut_is_never_read_as_whatever_lay_in_memory(tmp_path: Path):
    activations = embedded(tmp_path)
    with activations.path.open("r+b") as file:
        file.truncate(activations.path.stat().st_size - 1)
    assert torch.equal(activations.windows(torch.tensor([0])), TABLE_VH[IDS_NT[:1]])
    with pytest.raises(InternalError, match="window 6 end too early"):
        list(activations.batches(2))
