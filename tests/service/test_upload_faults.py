"""Uploads on a bad day: the server killed at every point, the disk full. What was promised holds after the restart."""

import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from modelpress.v1 import artifacts_pb2 as pb
from tests.service.wire import chunks, sha256

POINTS = (
    "upload.create.before",
    "upload.create.after",
    "upload.write.unsynced",
    "upload.write.after",
    "store.put.before",
    "store.put.after",
    "upload.complete.before",
    "upload.complete.after",
)
EVERY_DAY = ("upload.write.unsynced", "store.put.after")
"""Each point costs two starts of the server: the others are visited by `make test-slow`."""


@pytest.mark.parametrize(
    "point", [pytest.param(point, marks=() if point in EVERY_DAY else pytest.mark.slow) for point in POINTS]
)
def test_after_a_kill_at_any_point_the_upload_goes_on_and_the_blob_is_right(
    start_server: Any, call: Any, tmp_path: Path, point: str
) -> None:
    data = random.Random(point).randbytes(3 << 20)
    dying = start_server(tmp_path / "data", MODELPRESS_KILL_AT=point)
    with pytest.raises(grpc.RpcError) as caught:
        call(dying).upload(data)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert dying.died() == -signal.SIGKILL
    restarted = start_server(tmp_path / "data")
    wire = call(restarted)
    missing = wire.artifacts.FindMissing(pb.FindMissingRequest(digests=[sha256(data)])).missing_digests
    assert bool(missing) == (point != "upload.complete.after")
    if missing:
        upload = wire.create_upload(data)
        if not upload.complete:
            upload = wire.artifacts.WriteUpload(chunks(upload.name, data, start=upload.received_bytes))
        assert upload.complete
    assert wire.download(sha256(data)) == data
    assert list((restarted.data / "store" / "staging").iterdir()) == []


def test_after_a_kill_between_chunks_the_upload_goes_on_where_it_was(
    start_server: Any, call: Any, tmp_path: Path
) -> None:
    data = random.Random(1).randbytes(3 << 20)
    first = start_server(tmp_path / "data")
    name = call(first).create_upload(data).name
    call(first).artifacts.WriteUpload(chunks(name, data[: 2 << 20]))
    first.kill()
    wire = call(start_server(tmp_path / "data"))
    resumed = wire.create_upload(data)
    assert (resumed.name, resumed.received_bytes) == (name, 2 << 20)
    assert wire.artifacts.WriteUpload(chunks(name, data, start=2 << 20)).complete


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], check=False)  # noqa: S607
    if mounted.returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)  # noqa: S607


def test_a_full_disk_is_said_clearly_and_leaves_nothing_behind(
    start_server: Any, call: Any, tmp_path: Path, small_disk: Path
) -> None:
    running = start_server(tmp_path / "data", f'[storage]\nstore_url = "{small_disk / "store"}"\n')
    wire, data = call(running), random.Random(2).randbytes(8 << 20)
    upload = wire.create_upload(data)
    refused = wire.refused(lambda: wire.artifacts.WriteUpload(chunks(upload.name, data)))
    assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "STORAGE_FULL")
    assert "storage is full" in refused.message and str(tmp_path) not in refused.message
    assert [file for file in small_disk.rglob("*") if file.is_file()] == []
    small = random.Random(3).randbytes(1 << 20)
    assert wire.download(wire.upload(small)) == small
