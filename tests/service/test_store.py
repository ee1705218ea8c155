"""The content store: durable, atomic, idempotent puts; verified reads; nothing left behind."""

import errno
import hashlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from modelpress.digests import Digest, digest_bytes
from modelpress.errors import DataLoss, InvalidRequest, NotFound, OverLimit
from modelpress.manifests import FileEntry, Manifest
from service.storage.store import ContentStore


@pytest.fixture
def store(tmp_path: Path) -> ContentStore:
    return ContentStore(str(tmp_path / "store"), scratch=tmp_path / "scratch")


def blob_files(root: Path) -> list[str]:
    return sorted(file.relative_to(root).as_posix() for file in root.rglob("*") if file.is_file())


def test_what_is_put_is_read_back_under_its_sha256(store: ContentStore, tmp_path: Path) -> None:
    digest = store.put_bytes(b"abc")
    assert str(digest) == "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert store.read_bytes(digest) == b"abc"
    assert blob_files(tmp_path / "store") == [f"blobs/sha256/ba/{digest.hex}"]


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 5 << 19])
def test_files_of_any_size_come_back_in_chunks_of_at_most_1_mib(store: ContentStore, tmp_path: Path, size: int) -> None:
    data = bytes(index * 31 % 251 for index in range(1000)) * (size // 1000 + 1)
    (tmp_path / "file").write_bytes(data[:size])
    digest = store.put_file(tmp_path / "file")
    chunks = list(store.read(digest))
    assert digest.hex == hashlib.sha256(data[:size]).hexdigest()
    assert b"".join(chunks) == data[:size] and all(len(chunk) <= 1 << 20 for chunk in chunks)
    assert store.size(digest) == size


def test_a_range_is_exactly_the_bytes_asked_for(store: ContentStore) -> None:
    digest = store.put_bytes(b"0123456789")
    assert b"".join(store.read(digest, offset=3, length=4)) == b"3456"
    assert b"".join(store.read(digest, offset=10)) == b""
    for offset, length in [(11, None), (-1, None), (0, 11), (5, -1)]:
        with pytest.raises(InvalidRequest):
            store.read(digest, offset=offset, length=length)


def test_putting_twice_writes_once(store: ContentStore, tmp_path: Path) -> None:
    digest = store.put_bytes(b"abc")
    file = tmp_path / "store" / "blobs" / "sha256" / "ba" / digest.hex
    before = file.stat().st_ino
    assert store.put_bytes(b"abc") == digest
    assert file.stat().st_ino == before
    assert len(blob_files(tmp_path / "store")) == 1


def test_a_damaged_blob_is_data_loss_and_healed_by_the_next_put(store: ContentStore, tmp_path: Path) -> None:
    digest = store.put_bytes(b"abc")
    file = tmp_path / "store" / "blobs" / "sha256" / "ba" / digest.hex
    file.write_bytes(b"abd")
    with pytest.raises(DataLoss, match=digest.hex):
        store.read_bytes(digest)
    assert not store.has(digest)
    assert (tmp_path / "store" / "damaged" / digest.hex).read_bytes() == b"abd"
    assert store.put_bytes(b"abc") == digest
    assert store.read_bytes(digest) == b"abc"


def test_a_blob_of_the_wrong_size_is_healed_by_the_next_put(store: ContentStore, tmp_path: Path) -> None:
    digest = store.put_bytes(b"abc")
    (tmp_path / "store" / "blobs" / "sha256" / "ba" / digest.hex).write_bytes(b"ab")
    assert store.put_bytes(b"abc") == digest
    assert store.read_bytes(digest) == b"abc"


def test_a_folder_comes_back_the_same_and_its_manifests_digest_is_its_blobs(
    store: ContentStore, tmp_path: Path
) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "config.json").write_bytes(b"{}")
    (tmp_path / "in" / "sub" / ".hidden").write_bytes(b"")
    manifest = store.put_folder(tmp_path / "in")
    assert store.read_bytes(manifest.digest) == manifest.to_json()
    assert store.manifest(manifest.digest) == manifest
    store.fetch_folder(manifest, tmp_path / "out")
    assert blob_files(tmp_path / "out") == ["config.json", "sub/.hidden"]
    assert (tmp_path / "out" / "config.json").read_bytes() == b"{}"


def test_fetching_a_damaged_file_is_data_loss_naming_it_and_leaves_it_out(store: ContentStore, tmp_path: Path) -> None:
    digest = store.put_bytes(b"abc")
    (tmp_path / "store" / "blobs" / "sha256" / "ba" / digest.hex).write_bytes(b"xyz")
    with pytest.raises(DataLoss, match=r"weights\.bin"):
        store.fetch_folder(Manifest((FileEntry("weights.bin", 3, digest),)), tmp_path / "out")
    assert blob_files(tmp_path / "out") == []
    assert not store.has(digest)


def test_links_never_enter_the_store(store: ContentStore, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link").symlink_to("/etc/hostname")
    with pytest.raises(InvalidRequest, match="link"):
        store.put_folder(tmp_path / "in")
    with pytest.raises(OSError):
        store.put_file(tmp_path / "in" / "link")


def test_what_is_not_there_is_not_found_and_delete_is_idempotent(store: ContentStore) -> None:
    digest = store.put_bytes(b"abc")
    store.delete(digest)
    store.delete(digest)
    assert not store.has(digest)
    with pytest.raises(NotFound):
        store.size(digest)
    with pytest.raises(NotFound):
        store.read_bytes(digest)


def test_a_blob_that_is_no_manifest_is_refused(store: ContentStore) -> None:
    for data in (b"not json", b"[]", b'{"files": [{}]}'):
        with pytest.raises(InvalidRequest):
            store.manifest(store.put_bytes(data))


def test_a_file_url_names_the_same_store_as_its_path(tmp_path: Path) -> None:
    digest = ContentStore(str(tmp_path / "a b"), scratch=tmp_path).put_bytes(b"abc")
    assert ContentStore((tmp_path / "a b").as_uri(), scratch=tmp_path).has(digest)


def test_a_full_disk_is_over_limit_and_leaves_nothing_behind(store: ContentStore, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(1 << 20))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    former = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, hard))
        with pytest.raises(OverLimit, match="storage is full") as caught:
            store.put_file(tmp_path / "big")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, former)
    assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == errno.EFBIG
    assert blob_files(tmp_path / "store") == []


@pytest.mark.parametrize("point", ["store.put.unsynced", "store.put.before", "store.put.after"])
def test_a_kill_at_any_point_leaves_a_whole_blob_or_none(tmp_path: Path, point: str) -> None:
    program = "import sys, pathlib; from service.storage.store import ContentStore as S\n"
    program += "S(sys.argv[1], scratch=pathlib.Path(sys.argv[1])).put_bytes(b'abc' * 1000)"
    environment = {**os.environ, "MODELPRESS_KILL_AT": point, "PYTHONPATH": "."}
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=environment, check=False)
    assert ended.returncode == -signal.SIGKILL
    store, digest = ContentStore(str(tmp_path), scratch=tmp_path), digest_bytes(b"abc" * 1000)
    assert store.has(digest) == (point == "store.put.after")
    assert store.put_bytes(b"abc" * 1000) == digest
    assert store.read_bytes(Digest(str(digest))) == b"abc" * 1000
