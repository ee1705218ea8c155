"""Folders in the store, in place: what is streamed is the file, what is written is a blob or nothing."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from modelpress.digests import digest_bytes
from modelpress.errors import DataLoss, InternalError, InvalidRequest, NotFound, OverLimit
from modelpress.manifests import FileEntry, Manifest
from service.state.engine import open_database
from service.state.uploads import UploadRepository
from service.storage.garbage import STALE_S, Collected, GarbageCollector
from service.storage.store import ContentStore
from service.storage.stored_folders import StoredFolder, StoreSink
from service.storage.uploads import UploadDesk, UploadLimits

MIB = 1 << 20
FILES = {"config.json": b"{}", "sub/empty": b"", "model.safetensors": random.Random(1).randbytes(2 * MIB + 17)}


@pytest.fixture
def store(tmp_path: Path) -> ContentStore:
    return ContentStore(str(tmp_path / "store"), scratch=tmp_path / "scratch")


@pytest.fixture
def source(store: ContentStore) -> StoredFolder:
    return StoredFolder(put(store), store)


def put(store: ContentStore, files: dict[str, bytes] = FILES) -> Manifest:
    return Manifest(tuple(FileEntry(path, len(data), store.put_bytes(data)) for path, data in files.items()))


def blob_file(folder: Path, data: bytes) -> Path:
    digest = digest_bytes(data)
    return folder / "store" / "blobs" / "sha256" / digest.hex[:2] / digest.hex


def files_of(folder: Path) -> list[Path]:
    return [file for file in (folder / "store").rglob("*") if file.is_file()]


@contextmanager
def files_end_at(size_bytes: int) -> Iterator[None]:
    """No file may grow beyond: the kernel answers EFBIG, as it answers ENOSPC on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    former = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, former)


@pytest.mark.parametrize("piece", [1, 7, 1000, MIB, MIB + 1, 3 * MIB])
def test_streamed_bytes_are_the_files_bytes_whatever_the_buffers(source: StoredFolder, piece: int) -> None:
    for path, data in FILES.items():
        expected = data[: 5000 * piece]
        found = bytearray(len(expected))
        with source.stream(path) as file:
            for start in range(0, len(found), piece):
                file.read_into(memoryview(found)[start : start + piece])
            if len(expected) == len(data):
                file.finish()
        assert found == expected


def test_a_range_is_read_in_place(source: StoredFolder) -> None:
    data, found = FILES["model.safetensors"], bytearray(MIB + 5)
    for offset in (0, 13, len(data) - len(found)):
        source.read_into("model.safetensors", offset, memoryview(found))
        assert found == data[offset : offset + len(found)]
    source.read_into("sub/empty", 0, memoryview(b""))


def test_a_range_outside_the_file_and_an_unknown_file_are_refused(source: StoredFolder) -> None:
    buffer = memoryview(bytearray(3))
    for offset in (-1, 0):
        with pytest.raises(InternalError, match=r"not inside file 'config\.json' of 2 bytes"):
            source.read_into("config.json", offset, buffer)
    with pytest.raises(NotFound, match=r"nothing\.bin"):
        source.verify("nothing.bin")
    with pytest.raises(DataLoss, match="ends at byte 2"), source.stream("config.json") as file:
        file.read_into(buffer)


def test_the_files_of_a_folder_are_its_manifests(source: StoredFolder) -> None:
    assert {path: entry.size_bytes for path, entry in source.files.items()} == {p: len(d) for p, d in FILES.items()}
    for path in FILES:
        source.verify(path)


def test_a_file_is_verified_only_when_all_of_it_was_read(source: StoredFolder, store: ContentStore) -> None:
    with source.stream("config.json") as file:
        file.read_into(memoryview(bytearray(1)))
        with pytest.raises(DataLoss, match="1 of its 2 bytes"):
            file.finish()
        file.read_into(memoryview(bytearray(1)))
        file.finish()
    assert store.holds(source.files["config.json"])


@pytest.mark.parametrize("position", [0, MIB - 1, MIB, 2 * MIB + 16])
def test_one_flipped_byte_is_data_loss_and_the_blob_is_set_aside(
    source: StoredFolder, store: ContentStore, tmp_path: Path, position: int
) -> None:
    data = bytearray(FILES["model.safetensors"])
    data[position] ^= 1
    blob_file(tmp_path, FILES["model.safetensors"]).write_bytes(data)
    with source.stream("model.safetensors") as file:
        file.read_into(memoryview(bytearray(len(data))))
        with pytest.raises(DataLoss, match=r"file 'model\.safetensors' no longer had its digest"):
            file.finish()
    assert not store.holds(source.files["model.safetensors"])


def test_verify_finds_damage(source: StoredFolder, store: ContentStore, tmp_path: Path) -> None:
    blob_file(tmp_path, b"{}").write_bytes(b"[]")
    with pytest.raises(DataLoss, match=r"config\.json"):
        source.verify("config.json")
    assert not store.holds(source.files["config.json"])


def test_a_file_that_was_cut_is_data_loss_where_its_bytes_end(source: StoredFolder, tmp_path: Path) -> None:
    data = FILES["model.safetensors"]
    os.truncate(blob_file(tmp_path, data), MIB)
    source.read_into("model.safetensors", 0, memoryview(bytearray(MIB)))
    with pytest.raises(DataLoss, match=r"model\.safetensors"):
        source.read_into("model.safetensors", 1, memoryview(bytearray(MIB)))
    with pytest.raises(NotFound), source.stream("model.safetensors"):
        pass


def test_what_is_written_has_the_manifest_of_the_same_folder(store: ContentStore, tmp_path: Path) -> None:
    sink = StoreSink(store)
    for path, data in FILES.items():
        (tmp_path / "in" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / path).write_bytes(data)
        with sink.write(path) as write:
            for start in range(0, len(data), 700_000):
                write(memoryview(data)[start : start + 700_000])
    manifest = sink.finish()
    other = ContentStore(str(tmp_path / "other"), scratch=tmp_path)
    assert manifest.digest == other.put_folder(tmp_path / "in").digest
    assert store.manifest(manifest.digest) == manifest
    store.fetch_folder(manifest, tmp_path / "out")
    assert all((tmp_path / "out" / path).read_bytes() == data for path, data in FILES.items())


def test_a_kept_file_is_the_one_that_is_there(source: StoredFolder, store: ContentStore) -> None:
    sink = StoreSink(store)
    assert all(sink.keep(entry) for entry in source.files.values())
    assert sink.entries == source.files
    assert sink.finish() == put(store)


def test_a_missing_blob_and_one_of_another_size_are_not_kept(store: ContentStore) -> None:
    sink, digest = StoreSink(store), store.put_bytes(b"abc")
    assert not sink.keep(FileEntry("a", 4, digest))
    assert not sink.keep(FileEntry("a", 3, digest_bytes(b"abd")))
    assert sink.entries == {}


def test_an_error_inside_leaves_no_staging_file_and_no_blob(store: ContentStore, tmp_path: Path) -> None:
    sink = StoreSink(store)
    with pytest.raises(ZeroDivisionError), sink.write("model.safetensors") as write:
        write(b"abc")
        raise ZeroDivisionError
    assert (files_of(tmp_path), sink.entries) == ([], {})


def test_a_full_disk_is_over_limit_and_leaves_nothing(store: ContentStore, tmp_path: Path) -> None:
    sink = StoreSink(store)
    full = pytest.raises(OverLimit, match="storage is full")
    with files_end_at(MIB // 2), full as caught, sink.write("model.safetensors") as write:
        write(bytes(MIB))
    assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == errno.EFBIG
    assert (files_of(tmp_path), sink.entries) == ([], {})


def test_two_files_of_one_path_and_a_path_outside_are_refused(store: ContentStore) -> None:
    sink = StoreSink(store)
    assert sink.keep(FileEntry("a", 3, store.put_bytes(b"abc")))
    with pytest.raises(InternalError, match="'a' was written twice"), sink.write("a"):
        pass
    with pytest.raises(InvalidRequest, match="plain relative path"), sink.write("../a"):
        pass


def test_equal_files_are_one_blob(store: ContentStore, tmp_path: Path) -> None:
    sink = StoreSink(store)
    for path in ("a", "b"):
        with sink.write(path) as write:
            write(b"the same")
    assert files_of(tmp_path) == [blob_file(tmp_path, b"the same")]
    assert sink.entries["a"].digest == sink.entries["b"].digest


def test_files_that_no_manifest_names_yet_are_no_garbage(store: ContentStore, tmp_path: Path) -> None:
    """A worker that was killed between two shards keeps the finished ones, however late its conversion is retried."""
    sink = StoreSink(store)
    with sink.write("model-00001-of-00002.safetensors") as write:
        write(b"the first shard")
    engine = open_database(f"sqlite:///{tmp_path}/state.sqlite")
    repository = UploadRepository(engine)
    later = tmp_path.stat().st_mtime + 100 * STALE_S
    desk = UploadDesk(store, repository, UploadLimits(MIB, STALE_S), clock=lambda: later)
    (store.staging / "put-of-a-killed-worker").write_bytes(b"half a shard")
    collector = GarbageCollector(store.staging, repository, desk, clock=lambda: later)
    assert collector.collect() == Collected(uploads=0, files=1)
    engine.dispose()
    assert StoreSink(store).keep(sink.entries["model-00001-of-00002.safetensors"])
