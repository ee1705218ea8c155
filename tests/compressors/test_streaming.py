"""The engine: which values it writes, what it reads for them and in which pieces, what it keeps unread."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from compressors import rounding, streaming
from compressors.changes import Rows, Unchanged
from compressors.weight_files import WeightFiles
from modelpress.errors import InternalError
from service.storage.stored_folders import StoreSink
from tests.compressors.stored_models import same
from tests.compressors.streams import CHANGES, EXPECTED, SHARDS, TENSORS, Doubled, Table


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path)


def test_a_change_reaches_its_tensor_in_every_dtype_and_shape(table: Table) -> None:
    sink = StoreSink(table.store)

    outcome = table.merge(sink)

    assert same(table.tensors(sink), EXPECTED)
    assert outcome.tensors.keys() == CHANGES.keys()
    assert {record.relative for record in outcome.tensors.values()} == {1.0}
    assert table.monitor.steps == [(step, SHARDS) for step in range(1, SHARDS + 1)]


def test_a_change_that_changes_nothing_is_told_from_one_that_does(table: Table) -> None:
    outcome = table.merge(StoreSink(table.store), {"a.weight": Unchanged(), "g.weight": Doubled()})

    assert {name: (record.changed, record.relative) for name, record in outcome.tensors.items()} == {
        "a.weight": (False, 0.0),
        "g.weight": (True, 1.0),
    }


def test_files_that_change_nothing_are_kept_unread(table: Table) -> None:
    sink, holder = StoreSink(table.store), WeightFiles.read(table.base).tensors["a.weight"].path

    table.merge(sink, {"a.weight": Doubled()})

    assert table.base.streamed == [holder]
    kept = {path for path, entry in sink.entries.items() if table.base.files[path] == entry}
    assert kept == sink.entries.keys() - {holder}


@pytest.mark.parametrize("piece", [16, 100, 1 << 20])
@pytest.mark.parametrize("block", [1, 64, 1 << 18])
def test_neither_pieces_nor_blocks_change_a_byte(piece: int, block: int, table: Table, monkeypatch) -> None:
    monkeypatch.setattr(streaming, "PIECE_BYTES", piece)
    monkeypatch.setattr(rounding, "BLOCK_ELEMENTS", block)
    sink = StoreSink(table.store)

    table.merge(sink)

    assert same(table.tensors(sink), EXPECTED)


def test_no_read_asks_for_more_than_one_tensor_that_changes(table: Table, monkeypatch) -> None:
    monkeypatch.setattr(streaming, "PIECE_BYTES", 32)

    headers = {file.data_start for file in WeightFiles.read(table.base).files}

    table.merge(StoreSink(table.store), {"c.weight": Doubled(), "e.ids": Unchanged()})

    whole = {TENSORS[name].nbytes for name in ("c.weight", "e.ids")}
    assert {size for size in table.base.reads if size > 32} - headers == whole
    assert sum(table.base.reads) == sum(table.base.files[path].size_bytes for path in table.base.streamed)


class TooFew:
    """A change that gives one row, whatever it is asked for: copying alone would repeat it."""

    def begin(self, stored: Tensor) -> Rows:
        return lambda start, stop: stored[start : start + 1].float()


def test_a_change_with_other_rows_than_its_tensor_is_our_fault_and_leaves_nothing(table: Table) -> None:
    sink = StoreSink(table.store)
    with pytest.raises(InternalError, match=r"c\.weight"):
        table.merge(sink, {"c.weight": TooFew()})

    assert WeightFiles.read(table.base).tensors["c.weight"].path not in sink.entries
