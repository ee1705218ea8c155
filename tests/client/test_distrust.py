"""What a damaged or hostile server sends is refused, and nothing of it is left behind."""

from concurrent.futures import ThreadPoolExecutor

import google_crc32c
import grpc
import pytest

from modelpress.canonical import canonical_json
from modelpress.client import Client
from modelpress.digests import digest_bytes
from modelpress.errors import DataLoss
from modelpress.retries import RetryPolicy
from modelpress.v1 import artifacts_pb2, artifacts_pb2_grpc

GOOD = b"what the manifest names"


class Artifacts(artifacts_pb2_grpc.ArtifactsServicer):
    """Serves one artifact with one file, as its fields say."""

    path = "model/weights"
    digest = str(digest_bytes(GOOD))
    data = GOOD
    offset = 0
    damage = 0

    @property
    def entry(self):
        return {"path": self.path, "size_bytes": len(GOOD), "digest": self.digest}

    def GetArtifact(self, request, context):  # noqa: N802 - the wire's name
        manifest = artifacts_pb2.Manifest(files=[artifacts_pb2.File(**self.entry)])
        return artifacts_pb2.Artifact(name=request.name, kind=artifacts_pb2.ARTIFACT_KIND_REPORT, manifest=manifest)

    def Download(self, request, context):  # noqa: N802 - the wire's name
        crc32c = google_crc32c.value(self.data) ^ self.damage
        yield artifacts_pb2.DownloadResponse(offset_bytes=self.offset, data=self.data, crc32c=crc32c)


@pytest.fixture
def hostile():
    """hostile(field=value, ...) -> download(folder, name=...) from a server that answers so."""
    started = []

    def start(**fields):
        servicer = Artifacts()
        vars(servicer).update(fields)
        server = grpc.server(ThreadPoolExecutor(2))
        artifacts_pb2_grpc.add_ArtifactsServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        client = Client(f"127.0.0.1:{port}", retry_policy=RetryPolicy(stream_patience_s=0.0))
        started.append((server, client))
        right_name = f"artifacts/{digest_bytes(canonical_json({'files': [servicer.entry]}))}"
        return lambda folder, name=right_name: client.download(name, folder)

    yield start
    for server, client in started:
        client.close()
        server.stop(0)


def files_below(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_the_honest_answer_is_taken(hostile, tmp_path):
    hostile()(tmp_path / "out")
    assert files_below(tmp_path) == ["out/model/weights"]


@pytest.mark.parametrize(
    "path", ["../escaped", "/etc/escaped", "model/../../escaped", "model//weights", ".", "a\\..\\b", "a\0b"]
)
def test_a_path_that_leaves_the_folder_writes_nothing(hostile, tmp_path, path):
    with pytest.raises(DataLoss, match="cannot be used"):
        hostile(path=path)(tmp_path / "out")
    assert files_below(tmp_path) == []


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"data": b"x" * len(GOOD)}, "do not have its digest"),
        ({"data": GOOD[:-1]}, "the server holds 22 of the 23 bytes"),
        ({"data": GOOD + b"x"}, "bytes of another place"),
        ({"offset": 1}, "bytes of another place"),
        ({"damage": 1}, "CRC32C"),
    ],
)
def test_wrong_bytes_never_reach_their_place(hostile, tmp_path, fields, sentence):
    with pytest.raises(DataLoss, match=sentence):
        hostile(**fields)(tmp_path / "out")
    assert not (tmp_path / "out/model/weights").exists()


def test_another_manifest_than_the_one_asked_for_is_refused(hostile, tmp_path):
    with pytest.raises(DataLoss, match="has the digest"):
        hostile()(tmp_path / "out", name=f"artifacts/sha256:{7:064x}")
    assert files_below(tmp_path) == []


def test_a_digest_that_is_none_is_refused(hostile, tmp_path):
    with pytest.raises(DataLoss, match="cannot be used"):
        hostile(digest="md5:0")(tmp_path / "out")
