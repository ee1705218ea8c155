"""Uploads over the wire: in order, checked, resumable, one writer, visible only when the digest is right."""

import random
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from modelpress.v1 import artifacts_pb2 as pb
from service.storage.uploads import is_at
from tests.service.wire import Drip, chunk, chunks, sha256, wait_until

CODE = grpc.StatusCode


def random_bytes(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def staged(server: Any) -> list[str]:
    return sorted(file.name for file in (server.data / "store" / "staging").iterdir())


def is_missing(wire: Any, digest: str) -> bool:
    return digest in wire.artifacts.FindMissing(pb.FindMissingRequest(digests=[digest])).missing_digests


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 2 << 20, 333_333])
def test_9_mib_in_chunks_come_back_exactly(wire: Any, chunk_bytes: int) -> None:
    data = random_bytes(chunk_bytes, 9 << 20)
    assert is_missing(wire, sha256(data))
    digest = wire.upload(data, chunk_bytes=chunk_bytes)
    assert not is_missing(wire, digest)
    assert wire.download(digest) == data
    assert wire.download(digest, offset=5_000_001, length=77) == data[5_000_001:5_000_078]
    assert wire.download(digest, offset=len(data)) == b""


def test_an_empty_blob_is_complete_from_the_start(wire: Any, server: Any) -> None:
    upload = wire.create_upload(b"")
    assert upload.complete and upload.received_bytes == 0
    assert wire.artifacts.WriteUpload(iter([chunk(upload.name, 0, b"")])).complete
    assert wire.download(sha256(b"")) == b""
    assert upload.name.removeprefix("uploads/") not in str(staged(server))


def test_the_same_upload_is_returned_until_it_is_complete(wire: Any) -> None:
    data = random_bytes(1, 1000)
    first, second = wire.create_upload(data), wire.create_upload(data)
    assert first.name == second.name
    wire.artifacts.WriteUpload(chunks(first.name, data))
    again = wire.artifacts.GetUpload(pb.GetUploadRequest(name=first.name))
    assert again.complete and again.received_bytes == 1000
    rewritten = wire.artifacts.WriteUpload(chunks(first.name, data))
    assert rewritten.complete and rewritten.received_bytes == 1000
    held = wire.refused(lambda: wire.create_upload(data))
    assert (held.code, held.reason) == (CODE.ALREADY_EXISTS, "BLOB_EXISTS")


def test_an_upload_with_another_size_is_refused_until_the_first_is_aborted(wire: Any) -> None:
    data = random_bytes(2, 1000)
    upload = wire.create_upload(data)
    other = pb.CreateUploadRequest(digest=sha256(data), size_bytes=999)
    refused = wire.refused(lambda: wire.artifacts.CreateUpload(other))
    assert (refused.code, refused.metadata) == (CODE.ALREADY_EXISTS, {"upload": upload.name})
    wire.artifacts.AbortUpload(pb.AbortUploadRequest(name=upload.name))
    assert wire.artifacts.CreateUpload(other).size_bytes == 999
    gone = wire.refused(lambda: wire.artifacts.GetUpload(pb.GetUploadRequest(name=upload.name)))
    assert gone.code == CODE.NOT_FOUND


def test_a_gap_is_refused_and_names_the_expected_offset(wire: Any) -> None:
    data = random_bytes(3, 3000)
    upload = wire.create_upload(data)
    wire.artifacts.WriteUpload(iter([chunk(upload.name, 0, data[:1000])]))
    for offset in (0, 999, 1001, 2000):
        request = chunk(upload.name, offset, data[offset:])
        refused = wire.refused(lambda request=request: wire.artifacts.WriteUpload(iter([request])))
        assert (refused.code, refused.reason, refused.fields) == (
            CODE.INVALID_ARGUMENT,
            "OFFSET_MISMATCH",
            ["offset_bytes"],
        )
        assert refused.metadata == {"expected_offset_bytes": "1000"}
    assert wire.artifacts.WriteUpload(chunks(upload.name, data, start=1000)).complete


def test_a_damaged_chunk_is_refused_and_can_be_sent_again(wire: Any) -> None:
    data = random_bytes(4, 2000)
    upload = wire.create_upload(data)
    bad = chunk(upload.name, 0, data[:1000])
    bad.data = b"\0" + bad.data[1:]
    refused = wire.refused(lambda: wire.artifacts.WriteUpload(iter([bad])))
    assert (refused.code, refused.reason) == (CODE.INVALID_ARGUMENT, "CHECKSUM_MISMATCH")
    assert wire.artifacts.WriteUpload(chunks(upload.name, data)).complete


def test_bytes_past_the_declared_size_end_the_upload_and_leave_nothing(wire: Any, server: Any) -> None:
    data = random_bytes(5, 1000)
    upload = wire.artifacts.CreateUpload(pb.CreateUploadRequest(digest=sha256(data), size_bytes=100))
    refused = wire.refused(lambda: wire.artifacts.WriteUpload(chunks(upload.name, data, chunk_bytes=60)))
    assert (refused.code, refused.reason) == (CODE.INVALID_ARGUMENT, "SIZE_EXCEEDED")
    assert "declared size of 100 bytes" in refused.message
    assert upload.name.removeprefix("uploads/") not in str(staged(server))
    gone = wire.refused(lambda: wire.artifacts.GetUpload(pb.GetUploadRequest(name=upload.name)))
    assert gone.code == CODE.NOT_FOUND


def test_a_wrong_digest_is_refused_and_its_bytes_are_deleted(wire: Any, server: Any) -> None:
    declared = "sha256:" + "0" * 64
    upload = wire.artifacts.CreateUpload(pb.CreateUploadRequest(digest=declared, size_bytes=5))
    refused = wire.refused(lambda: wire.artifacts.WriteUpload(iter([chunk(upload.name, 0, b"bytes")])))
    assert (refused.code, refused.reason) == (CODE.INVALID_ARGUMENT, "DIGEST_MISMATCH")
    assert sha256(b"bytes") in refused.message
    assert is_missing(wire, declared)
    assert upload.name.removeprefix("uploads/") not in str(staged(server))


def test_chunks_of_more_than_2_mib_and_messages_of_more_than_4_are_refused(wire: Any) -> None:
    data = random_bytes(6, 5 << 20)
    upload = wire.create_upload(data)
    for size in ((2 << 20) + 1, 5 << 20):
        request = chunk(upload.name, 0, data[:size])
        refused = wire.refused(lambda request=request: wire.artifacts.WriteUpload(iter([request])))
        assert refused.code == CODE.RESOURCE_EXHAUSTED
    assert wire.artifacts.WriteUpload(chunks(upload.name, data)).complete


def test_an_empty_chunk_at_the_end_finishes_what_is_all_there(wire: Any, server: Any) -> None:
    data = random_bytes(11, 1000)
    upload = wire.create_upload(data)
    (server.data / "store" / "staging" / upload.name.replace("uploads/", "upload-")).write_bytes(data)
    assert wire.artifacts.WriteUpload(iter([chunk(upload.name, 1000, b"")])).complete
    assert wire.download(sha256(data)) == data


def test_an_empty_stream_and_an_empty_chunk_are_refused(wire: Any) -> None:
    upload = wire.create_upload(b"some bytes")
    nothing = wire.refused(lambda: wire.artifacts.WriteUpload(iter([])))
    empty = wire.refused(lambda: wire.artifacts.WriteUpload(iter([chunk(upload.name, 0, b"")])))
    assert nothing.code == empty.code == CODE.INVALID_ARGUMENT
    assert "empty" in nothing.message and "empty" in empty.message


def received(wire: Any, name: str) -> int:
    return int(wire.artifacts.GetUpload(pb.GetUploadRequest(name=name)).received_bytes)


def test_a_second_writer_is_aborted_and_the_first_one_goes_on(wire: Any) -> None:
    data = random_bytes(7, 3000)
    name = wire.create_upload(data).name
    first = Drip()
    first.send(chunk(name, 0, data[:1000]))
    running = wire.artifacts.WriteUpload.future(iter(first))
    wait_until(lambda: received(wire, name) == 1000)
    second = wire.refused(lambda: wire.artifacts.WriteUpload(chunks(name, data, start=1000)))
    abort = wire.refused(lambda: wire.artifacts.AbortUpload(pb.AbortUploadRequest(name=name)))
    assert (second.code, second.reason) == (abort.code, abort.reason) == (CODE.ABORTED, "UPLOAD_BUSY")
    first.send(chunk(name, 1000, data[1000:]))
    first.end()
    assert running.result().complete


def test_of_many_writers_at_once_one_wins_and_the_blob_is_right(wire: Any) -> None:
    data = random_bytes(8, 4 << 20)
    name = wire.create_upload(data).name
    outcomes: list[Any] = []

    def write() -> None:
        try:
            outcomes.append(wire.artifacts.WriteUpload(chunks(name, data, chunk_bytes=1 << 18)).complete)
        except grpc.RpcError as error:
            outcomes.append(error.code())

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert True in outcomes and set(outcomes) <= {True, CODE.ABORTED}
    assert wire.download(sha256(data)) == data


@pytest.mark.parametrize("end", ["cancel", "deadline"])
def test_a_cut_stream_keeps_its_bytes_unseen_and_is_resumed_at_random_points(wire: Any, end: str) -> None:
    rng = random.Random(end)
    data = rng.randbytes(3 << 20)
    name = wire.create_upload(data).name
    for cut in sorted(rng.sample(range(1, len(data)), 4)):
        start = received(wire, name)
        drip = Drip()
        for request in chunks(name, data[:cut], start=start, chunk_bytes=1 << 18):
            drip.send(request)
        running = wire.artifacts.WriteUpload.future(iter(drip), timeout=0.7 if end == "deadline" else None)
        wait_until(lambda cut=cut: received(wire, name) == cut)
        if end == "cancel":
            running.cancel()
            assert running.cancelled()
        else:
            assert running.code() == CODE.DEADLINE_EXCEEDED
        drip.end()
        assert is_missing(wire, sha256(data))
        wait_until(lambda: not _is_busy(wire, name))
        assert received(wire, name) == cut
    assert wire.artifacts.WriteUpload(chunks(name, data, start=received(wire, name))).complete
    assert wire.download(sha256(data)) == data


def _is_busy(wire: Any, name: str) -> bool:
    """An empty chunk is refused either way; the reason tells whether somebody writes."""
    refused = wire.refused(lambda: wire.artifacts.WriteUpload(iter([pb.WriteUploadRequest(name=name)])))
    return bool(refused.reason == "UPLOAD_BUSY")


def test_an_aborted_upload_leaves_nothing(wire: Any, server: Any) -> None:
    data = random_bytes(9, 2000)
    name = wire.create_upload(data).name
    wire.artifacts.WriteUpload(iter([chunk(name, 0, data[:1000])]))
    assert name.removeprefix("uploads/") in str(staged(server))
    wire.artifacts.AbortUpload(pb.AbortUploadRequest(name=name))
    assert name.removeprefix("uploads/") not in str(staged(server))
    assert wire.create_upload(data).received_bytes == 0


def test_an_expired_upload_is_collected_and_one_that_is_alive_is_not(
    start_server: Any, call: Any, tmp_path: Path
) -> None:
    toml = "[limits]\nupload_expiry_s = 0.2\n"
    first = start_server(tmp_path / "data", toml)
    wire, data = call(first), random_bytes(10, 1000)
    name = wire.create_upload(data).name
    wire.artifacts.WriteUpload(iter([chunk(name, 0, data[:500])]))
    (first.data / "store" / "staging" / "put-fresh").write_bytes(b"")
    assert first.stop() == 0
    time.sleep(0.2)
    second = start_server(tmp_path / "data", toml)
    assert staged(second) == ["put-fresh"]
    assert call(second).refused(lambda: received(call(second), name)).code == CODE.NOT_FOUND


@pytest.mark.slow
def test_the_servers_memory_stays_flat_whatever_the_size(start_server: Any, call: Any, tmp_path: Path) -> None:
    running = start_server(tmp_path / "data")
    wire, process = call(running), psutil.Process(running.process.pid)
    wire.upload(random_bytes(12, 4 << 20))
    before = process.memory_info().rss
    digest = wire.upload(random_bytes(13, 1 << 20) * 256)
    for message in wire.artifacts.Download(pb.DownloadRequest(digest=digest)):
        assert len(message.data) <= 1 << 20
    assert process.memory_info().rss - before < 64 << 20


def test_a_file_that_another_writer_moves_meanwhile_is_not_at_its_path_and_no_fault(tmp_path: Path) -> None:
    file, over = tmp_path / "upload-x", threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            file.touch()
            file.unlink()

    with (tmp_path / "mine").open("wb") as mine:
        other = threading.Thread(target=come_and_go)
        other.start()
        found = {is_at(file, mine.fileno()) for _ in range(20_000)}
        over.set()
        other.join()
    assert found == {False}
