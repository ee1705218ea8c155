"""What is left of a merge that fails, is killed or is resumed: finished files, and nothing else."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest
import torch

from compressors import streaming
from compressors.changes import Rows, wide
from compressors.output_plan import OutputPlan
from compressors.stages import StreamJob
from compressors.streaming import merge_files
from compressors.weight_files import WeightFiles
from modelpress.digests import Digest
from modelpress.errors import DataLoss, InvalidModel, OverLimit
from modelpress.manifests import FileEntry
from service.storage.stored_folders import StoreSink
from tests.compressors.streams import CHANGES, SHARDS, TENSORS, Doubled, FailingSink, KeepingMonitor, Table


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path)


@pytest.mark.parametrize("fail_at", range(1, SHARDS + 1))
def test_a_killed_merge_goes_on_to_the_same_bytes(fail_at: int, table: Table, tmp_path: Path) -> None:
    at_once = StoreSink(table.store)
    changes = {name: Doubled() for name in TENSORS if name != "h.empty"}
    monitor, table.monitor = table.monitor, KeepingMonitor(tmp_path / "unused")
    whole = table.merge(at_once, changes)
    table.monitor = monitor

    with pytest.raises(KeyboardInterrupt):
        table.merge(FailingSink(table.store, fail_at=fail_at, error=KeyboardInterrupt()), changes)
    resumed = StoreSink(table.store)
    outcome = table.merge(resumed, changes)

    assert len(table.base.streamed) == SHARDS - fail_at + 1
    assert resumed.entries == at_once.entries
    assert outcome == whole


def test_a_finished_file_that_the_store_has_lost_is_written_again(table: Table) -> None:
    first = StoreSink(table.store)
    table.merge(first)
    lost = next(entry for path, entry in sorted(first.entries.items()) if table.base.files[path] != entry)
    table.blob(lost.digest).unlink()
    again = StoreSink(table.store)

    table.merge(again)

    assert table.base.streamed == [lost.path]
    assert again.entries == first.entries


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space"), OverLimit("the disk is full"), SystemExit(1)])
def test_an_error_of_the_sink_reaches_the_caller_and_leaves_nothing(error: BaseException, table: Table) -> None:
    before, threads = table.blobs(), threading.enumerate()
    sink = FailingSink(table.store, fail_at=1, error=error)

    with pytest.raises(type(error)) as raised:
        table.merge(sink)

    assert raised.value is error
    assert threading.enumerate() == threads
    assert (table.blobs(), sink.entries, list(table.store.staging.iterdir())) == (before, {}, [])


def test_no_thread_is_left_of_a_merge(table: Table) -> None:
    threads = threading.enumerate()

    table.merge(StoreSink(table.store))

    assert threading.enumerate() == threads


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_damaged_base_is_data_loss_and_no_output(damage: str, table: Table) -> None:
    path = WeightFiles.read(table.base).tensors["a.weight"].path
    blob = table.blob(table.base.files[path].digest)
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    files = WeightFiles.read(table.base)
    blob.chmod(0o600)
    blob.write_bytes(data if damage == "flip" else data[:-1])
    sink, threads = StoreSink(table.store), threading.enumerate()

    with pytest.raises(DataLoss):
        merge_files(files, OutputPlan.of(files, CHANGES), StreamJob(table.base, sink, seed=0), table.monitor)

    assert path not in sink.entries
    assert threading.enumerate() == threads


def test_a_kept_file_that_is_gone_is_data_loss_with_the_cure(table: Table) -> None:
    path = WeightFiles.read(table.base).tensors["g.weight"].path
    files = WeightFiles.read(table.base)
    table.blob(table.base.files[path].digest).unlink()

    with pytest.raises(DataLoss, match=f"{path}.*upload the base again"):
        merge_files(
            files,
            OutputPlan.of(files, {"a.weight": Doubled()}),
            StreamJob(table.base, StoreSink(table.store), seed=0),
            table.monitor,
        )


class Infinite:
    def begin(self, stored: torch.Tensor) -> Rows:
        return lambda start, stop: wide(stored[start:stop]) * torch.inf


def test_an_error_of_the_arithmetic_leaves_nothing_of_its_file(table: Table) -> None:
    sink, threads = StoreSink(table.store), threading.enumerate()

    with pytest.raises(InvalidModel, match=r"'g\.weight'.*NaN or infinite"):
        table.merge(sink, {"g.weight": Infinite()})

    assert WeightFiles.read(table.base).tensors["g.weight"].path not in sink.entries
    assert threading.enumerate() == threads


def test_checkpoints_hold_what_they_are_read_for(tmp_path: Path) -> None:
    entry = FileEntry("model.safetensors", 12, Digest("sha256:" + "ab" * 32))
    records = {"x": streaming.TensorRecord(0.25, changed=True), "y": streaming.TensorRecord(None, changed=True)}
    outcome = streaming.MergeOutcome(records, {entry.path: entry})

    outcome.save(tmp_path)

    assert streaming.MergeOutcome.resumed(tmp_path) == outcome
    assert streaming.MergeOutcome.resumed(None) == streaming.MergeOutcome()
