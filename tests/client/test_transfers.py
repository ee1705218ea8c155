"""Uploads and downloads against a real server: nothing is sent twice, and a cut costs only what was on the way."""

import random
import threading
from pathlib import Path

import pytest

from modelpress.client import Client
from modelpress.connection import Connection, Endpoint
from modelpress.digests import digest_bytes
from modelpress.downloads import PARTIAL
from modelpress.errors import DataLoss, DigestMismatch, FailedPrecondition, ModelpressError, NotFound, Unavailable
from modelpress.manifests import ArtifactKind, FileEntry, scan_folder
from modelpress.retries import RetryPolicy
from modelpress.transfers import Meter, upload_blob

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path):
    """folder(seed, large_bytes) -> a dataset folder with a nested, a hidden, an empty, a doubled and a large file."""

    def write(seed, large_bytes=3 * MIB + 17):
        root = tmp_path / f"folder-{seed}"
        (root / "nested").mkdir(parents=True)
        large = random.Random(seed).randbytes(large_bytes)
        (root / "large.dat").write_bytes(large)
        (root / "rows.jsonl").write_text(f'{{"text": "row of {seed}", "label": "a"}}\n')
        (root / "nested/again.jsonl").write_text(f'{{"text": "row of {seed}", "label": "a"}}\n')
        (root / ".hidden").write_text(f"hidden {seed}")
        (root / "empty").write_bytes(b"")
        return root

    return write


class Seen:
    """The progress that a transfer showed."""

    def __init__(self):
        self.all = []

    def __call__(self, progress):
        self.all.append(progress)


def test_a_folder_goes_up_and_comes_back_byte_for_byte(server, folder, tmp_path):
    source = folder(1)
    with Client(server.address) as client:
        name = client.upload_folder(source, ArtifactKind.DATASET)
        assert name == f"artifacts/{scan_folder(source).digest}"
        artifact = client.get_artifact(name)
        assert (artifact.kind, artifact.manifest) == (ArtifactKind.DATASET, scan_folder(source))
        client.download(name, tmp_path / "back")
    assert scan_folder(tmp_path / "back") == scan_folder(source)


def test_what_the_server_holds_is_not_sent_again(server, folder, proxy):
    source, between, seen = folder(2), proxy(server), Seen()
    with Client(between.address) as client:
        first = client.upload_folder(source, ArtifactKind.DATASET, show=seen)
        sent = between.up_bytes
        assert seen.all[-1].done_bytes == seen.all[-1].total_bytes > 3 * MIB
        (source / "rows.jsonl").write_text('{"text": "changed", "label": "a"}\n')
        assert client.upload_folder(source, ArtifactKind.DATASET) != first
    assert between.up_bytes - sent < MIB


def test_an_upload_goes_on_where_it_was_cut(server, folder, proxy, patient):
    source, between = folder(3, large_bytes=24 * MIB), proxy(server)
    between.cut_up_at = 14 * MIB
    with Client(between.address, retry_policy=patient) as client:
        name = client.upload_folder(source, ArtifactKind.DATASET)
    assert between.cuts == 1
    assert name == f"artifacts/{scan_folder(source).digest}"
    assert between.up_bytes < 24 * MIB + 12 * MIB


def test_an_upload_survives_the_server_s_sudden_death(start_server, folder, proxy, patient, tmp_path):
    source, data = folder(4, large_bytes=24 * MIB), tmp_path / "server"
    first = start_server(data)
    between = proxy(first)
    killed = threading.Event()

    def kill_half_way(progress):
        if progress.done_bytes > 12 * MIB and not killed.is_set():
            killed.set()
            first.kill()
            threading.Thread(target=lambda: setattr(between, "target", start_server(data).address)).start()

    with Client(between.address, retry_policy=patient) as client:
        name = client.upload_folder(source, ArtifactKind.DATASET, show=kill_half_way)
        assert killed.is_set()
        client.download(name, tmp_path / "back")
    assert scan_folder(tmp_path / "back") == scan_folder(source)


def test_two_clients_that_send_the_same_at_once_both_succeed(server, folder, patient):
    source, names = folder(5, large_bytes=16 * MIB), []

    def send():
        try:
            with Client(server.address, retry_policy=patient) as client:
                names.append(client.upload_folder(source, ArtifactKind.DATASET))
        except ModelpressError as fault:
            names.append(repr(fault))

    threads = [threading.Thread(target=send) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names == [f"artifacts/{scan_folder(source).digest}"] * 3


def test_a_file_that_changed_since_it_was_read_is_named(server, tmp_path, patient):
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    entry = FileEntry("sub/model.safetensors", 100, digest_bytes(b"what was there before"))
    connection = Connection(Endpoint(server.address), patient)
    with pytest.raises(DigestMismatch, match=r"'sub/model.safetensors' changed"):
        upload_blob(connection, tmp_path / "model.safetensors", entry, Meter(100, lambda _: None))
    (tmp_path / "model.safetensors").write_bytes(b"x" * 50)
    with pytest.raises(DigestMismatch, match="changed"):
        upload_blob(connection, tmp_path / "model.safetensors", entry, Meter(100, lambda _: None))
    connection.close()


def test_a_download_goes_on_where_it_was_cut(server, folder, proxy, patient, tmp_path):
    source, between = folder(6, large_bytes=24 * MIB), proxy(server)
    with Client(server.address) as client:
        name = client.upload_folder(source, ArtifactKind.DATASET)
    between.cut_down_at = 14 * MIB
    with Client(between.address, retry_policy=patient) as client:
        client.download(name, tmp_path / "back")
    assert between.cuts == 1
    assert scan_folder(tmp_path / "back") == scan_folder(source)
    assert between.down_bytes < 24 * MIB + 12 * MIB


def test_a_download_that_gave_up_is_completed_by_the_next_one(server, folder, proxy, tmp_path):
    source, between, back = folder(7, large_bytes=24 * MIB), proxy(server), tmp_path / "back"
    with Client(server.address) as client:
        name = client.upload_folder(source, ArtifactKind.DATASET)
        between.cut_down_at = 14 * MIB
        impatient = RetryPolicy(stream_patience_s=0.0)
        with Client(between.address, retry_policy=impatient) as other, pytest.raises(Unavailable):
            other.download(name, back)
        assert (back / PARTIAL).is_dir()
        before = between.down_bytes
        with Client(between.address) as other:
            other.download(name, back)
    assert scan_folder(back) == scan_folder(source)
    assert between.down_bytes - before < 24 * MIB - 8 * MIB


@pytest.mark.parametrize("damage", ["what was there", "what the server holds"])
def test_bytes_without_the_digest_never_become_a_file(start_server, folder, tmp_path, damage):
    running, source, back = start_server(tmp_path / "data", MODELPRESS_WORKERS_SLOTS="0"), folder(11), tmp_path / "back"
    digest = scan_folder(source).entry("large.dat").digest
    with Client(running.address) as client:
        name = client.upload_folder(source, ArtifactKind.DATASET)
        stored = next((running.data / "store").rglob(digest.hex))
        right = stored.read_bytes()
        (back / PARTIAL).mkdir(parents=True)
        if damage == "what was there":
            (back / PARTIAL / digest.hex).write_bytes(b"x" + right[1:MIB])
        else:
            stored.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
        with pytest.raises(DataLoss, match=r"'large.dat' do not have its digest"):
            client.download(name, back)
        assert not (back / "large.dat").exists() and not (back / PARTIAL / digest.hex).exists()
        stored.write_bytes(right)
        client.download(name, back)
    assert scan_folder(back) == scan_folder(source)


def test_a_folder_that_holds_the_output_already_is_left_alone(server, folder, tmp_path):
    source, back = folder(8), tmp_path / "back"
    with Client(server.address) as client:
        name = client.upload_folder(source, ArtifactKind.DATASET)
        client.download(name, back)
        (back / "rows.jsonl").unlink()
        before = (back / "large.dat").stat().st_mtime_ns
        client.download(name, back)
    assert scan_folder(back) == scan_folder(source)
    assert (back / "large.dat").stat().st_mtime_ns == before


@pytest.mark.parametrize("foreign", ["foreign.txt", "rows.jsonl", "nested/deep/foreign.txt"])
def test_a_folder_with_anything_else_is_refused_and_left_alone(server, folder, tmp_path, foreign):
    source, back = folder(9), tmp_path / "back"
    (back / foreign).parent.mkdir(parents=True)
    (back / foreign).write_text("mine")
    with Client(server.address) as client:
        name = client.upload_folder(source, ArtifactKind.DATASET)
        with pytest.raises(FailedPrecondition, match=foreign):
            client.download(name, back)
    assert [path.name for path in back.rglob("*") if path.is_file()] == [Path(foreign).name]
    assert (back / foreign).read_text() == "mine"


def test_a_link_in_the_folder_is_refused(server, folder, tmp_path):
    source, back, outside = folder(10), tmp_path / "back", tmp_path / "outside"
    back.mkdir()
    outside.mkdir()
    (back / "nested").symlink_to(outside)
    with Client(server.address) as client:
        name = client.upload_folder(source, ArtifactKind.DATASET)
        with pytest.raises(FailedPrecondition, match="nested"):
            client.download(name, back)
    assert list(outside.iterdir()) == []


def test_an_artifact_that_is_not_there_leaves_no_folder(server, tmp_path):
    with Client(server.address) as client, pytest.raises(NotFound):
        client.download(f"artifacts/sha256:{0:064x}", tmp_path / "back")
    assert not (tmp_path / "back").exists()
