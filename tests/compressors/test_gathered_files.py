"""Gathering tensors from store to store: their bytes and order, large files split, a killed run going on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from compressors import gathered_files
from compressors.gathered_files import Gathered, gather, in_files, made_tensor, stored_tensor
from compressors.stages import StreamJob
from compressors.weight_files import WeightFiles
from modelpress.errors import InternalError
from service.storage.stored_folders import StoreSink
from tests.compressors.stored_models import same, weights_of
from tests.compressors.streams import TENSORS, FailingSink, Table


@pytest.fixture
def table(tmp_path: Path) -> Table:
    table = Table(tmp_path)
    (tmp_path / "base/tokenizer.json").write_text("{}")
    table.base = type(table.base)(tmp_path / "base", table.store)
    return table


def gathered(table: Table, sink: StoreSink) -> Gathered:
    base = WeightFiles.read(table.base)
    tensors = [stored_tensor(base, tensor) for tensor in base.tensors.values()]
    return gather(base, tensors, StreamJob(table.base, sink, seed=0), table.monitor)


def test_all_tensors_stand_in_one_file_byte_for_byte(table: Table, tmp_path: Path) -> None:
    sink = StoreSink(table.store)

    done = gathered(table, sink)

    table.store.fetch_folder(sink.finish(), tmp_path / "output")
    assert sorted(path.name for path in (tmp_path / "output").iterdir()) == ["model.safetensors", "tokenizer.json"]
    assert same(weights_of(tmp_path / "output"), TENSORS)
    assert done.sizes == {"model.safetensors": (tmp_path / "output/model.safetensors").stat().st_size}
    assert sink.entries["tokenizer.json"] == table.base.files["tokenizer.json"]


def test_wide_dtypes_come_first_so_that_every_tensor_is_aligned(table: Table, tmp_path: Path) -> None:
    sink = StoreSink(table.store)
    gathered(table, sink)
    table.store.fetch_folder(sink.finish(), tmp_path / "output")

    base = WeightFiles.read(type(table.base)(tmp_path / "output", table.store))

    stored = base.files[0].tensors
    assert all(tensor.offset % tensor.dtype.itemsize == 0 for tensor in stored)
    assert [tensor.name for tensor in stored] == [
        *("e.ids", "f.weight"),
        *("a.weight", "d.scale", "g.weight", "h.empty"),
        *("b.bias", "c.weight"),
    ]


@pytest.mark.parametrize("limit", [400, 1000])
def test_files_stay_below_the_limit_unless_one_tensor_is_larger(table: Table, limit: int, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(gathered_files, "MAX_FILE_BYTES", limit)
    sink = StoreSink(table.store)

    done = gathered(table, sink)

    table.store.fetch_folder(sink.finish(), tmp_path / "output")
    assert same(weights_of(tmp_path / "output"), TENSORS)
    index = json.loads((tmp_path / "output/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == TENSORS.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
    for path in done.sizes:
        with safe_open(tmp_path / "output" / path, framework="pt") as file:
            sizes = [file.get_tensor(name).nbytes for name in file.keys()]  # noqa: SIM118 - safe_open has no __iter__
            assert {index["weight_map"][name] for name in file.keys()} == {path}  # noqa: SIM118
        assert sum(sizes) <= limit or len(sizes) == 1


@pytest.mark.parametrize("fail_at", [1, 2, 3])
def test_a_run_after_a_kill_goes_on_with_the_next_file_to_the_same_bytes(table: Table, fail_at: int, monkeypatch):
    monkeypatch.setattr(gathered_files, "MAX_FILE_BYTES", 1000)
    whole = StoreSink(table.store)
    count = len(gathered(table, whole).sizes)
    table.monitor.steps.clear()
    monitor = type(table.monitor)(table.root / "second")
    table.monitor = monitor
    with pytest.raises(KeyboardInterrupt):
        gathered(table, FailingSink(table.store, fail_at=fail_at, error=KeyboardInterrupt()))

    written: list[str] = []
    sink = Noting(table.store, written)
    gathered(table, sink)

    assert sink.finish() == whole.finish()
    assert [path for path in written if path.endswith(".safetensors")] == sorted(whole.entries)[fail_at - 1 : count]


class Noting(StoreSink):
    """Notes the paths that are written."""

    def __init__(self, store, written: list[str]) -> None:
        super().__init__(store)
        self._written = written

    def write(self, path: str):
        self._written.append(path)
        return super().write(path)


def test_tensors_pass_in_pieces(table: Table, monkeypatch) -> None:
    base = WeightFiles.read(table.base)
    largest = max(base.tensors.values(), key=lambda tensor: tensor.size_bytes)
    monkeypatch.setattr(gathered_files, "PIECE_BYTES", 100)

    pieces = [bytes(piece) for piece in stored_tensor(base, largest).pieces()]

    assert {len(piece) for piece in pieces[:-1]} == {100}
    assert b"".join(pieces) == base.load(largest.name).numpy().tobytes()


def test_a_made_tensor_is_what_its_header_says() -> None:
    made = made_tensor("a", lambda: torch.ones(2, 3).T, dtype=torch.float32, shape=(3, 2))
    assert [len(piece) for piece in made.pieces()] == [24]
    with pytest.raises(InternalError, match="'a'"):
        list(made_tensor("a", lambda: torch.ones(3), dtype=torch.float32, shape=(2,)).pieces())


def test_tensors_fill_files_in_the_order_in_which_they_are_given(monkeypatch) -> None:
    monkeypatch.setattr(gathered_files, "MAX_FILE_BYTES", 8)
    shapes = {"c": 1, "b": 1, "a": 3, "d": 1}
    tensors = [made_tensor(n, lambda: torch.ones(0), dtype=torch.float32, shape=(s,)) for n, s in shapes.items()]

    names = [[tensor.output.name for tensor in held] for held in in_files(tensors).values()]

    assert names == [["b", "c"], ["a"], ["d"]]
