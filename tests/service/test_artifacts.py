"""Artifacts over the wire: made of held blobs, checked by intake, listed in pages, seen by their tenant only."""

import json
import random
from typing import Any

import grpc
import pytest

from modelpress.digests import Digest
from modelpress.manifests import FileEntry, Manifest
from modelpress.v1 import artifacts_pb2 as pb
from tests.service.wire import sha256

CODE = grpc.StatusCode


def dataset(seed: int, rows: int = 3) -> bytes:
    lines = [json.dumps({"text": f"text {seed} {row}", "label": "benign"}) for row in range(rows)]
    return "\n".join(lines).encode() + b"\n"


def manifest(files: dict[str, bytes]) -> pb.Manifest:
    return pb.Manifest(
        files=[pb.File(path=path, size_bytes=len(data), digest=sha256(data)) for path, data in files.items()]
    )


def create(wire: Any, files: dict[str, bytes]) -> pb.Artifact:
    for data in files.values():
        wire.upload(data)
    request = pb.CreateArtifactRequest(kind=pb.ARTIFACT_KIND_DATASET, manifest=manifest(files))
    return wire.artifacts.CreateArtifact(request)


def test_an_artifact_is_named_by_its_manifests_digest_and_creating_it_twice_is_once(wire: Any) -> None:
    data = dataset(1)
    artifact = create(wire, {"rows.jsonl": data})
    expected = Manifest((FileEntry("rows.jsonl", len(data), Digest(sha256(data))),))
    assert artifact.name == f"artifacts/{expected.digest}"
    assert (artifact.size_bytes, artifact.file_count) == (len(data), 1)
    request = pb.CreateArtifactRequest(kind=pb.ARTIFACT_KIND_DATASET, manifest=artifact.manifest)
    assert wire.artifacts.CreateArtifact(request) == artifact
    assert wire.artifacts.GetArtifact(pb.GetArtifactRequest(name=artifact.name)) == artifact


def test_missing_blobs_are_named_as_a_precondition(wire: Any) -> None:
    files = {f"{number}.jsonl": dataset(1000 + number) for number in range(30)}
    request = pb.CreateArtifactRequest(kind=pb.ARTIFACT_KIND_DATASET, manifest=manifest(files))
    refused = wire.refused(lambda: wire.artifacts.CreateArtifact(request))
    assert (refused.code, refused.reason) == (CODE.FAILED_PRECONDITION, "MISSING_BLOBS")
    assert refused.message.startswith("30 blobs")
    assert len(refused.missing) == 20 and set(refused.missing) <= {sha256(data) for data in files.values()}


def test_a_declared_size_that_is_not_the_blobs_is_refused(wire: Any) -> None:
    digest = wire.upload(dataset(2))
    files = [pb.File(path="rows.jsonl", size_bytes=1, digest=digest)]
    request = pb.CreateArtifactRequest(kind=pb.ARTIFACT_KIND_DATASET, manifest=pb.Manifest(files=files))
    refused = wire.refused(lambda: wire.artifacts.CreateArtifact(request))
    assert (refused.code, refused.fields) == (CODE.INVALID_ARGUMENT, ["manifest.files.size_bytes"])
    assert "'rows.jsonl' is declared with 1 bytes" in refused.message


@pytest.mark.parametrize("path", ["../rows.jsonl", "/rows.jsonl", "a//b", "a/./b", "", "a\\b", "a\0b"])
def test_a_path_that_leaves_its_folder_is_refused(wire: Any, path: str) -> None:
    files = manifest({path: dataset(3)})
    request = pb.CreateArtifactRequest(kind=pb.ARTIFACT_KIND_DATASET, manifest=files)
    refused = wire.refused(lambda: wire.artifacts.CreateArtifact(request))
    assert (refused.code, refused.fields) == (CODE.INVALID_ARGUMENT, ["manifest.files.path"])


def test_what_intake_refuses_is_no_artifact(wire: Any) -> None:
    data = b"not json\n"
    refused = wire.refused(lambda: create(wire, {"rows.jsonl": data}))
    assert refused.code == CODE.INVALID_ARGUMENT and "rows.jsonl, line 1" in refused.message
    digest = Manifest((FileEntry("rows.jsonl", len(data), Digest(sha256(data))),)).digest
    request = pb.GetArtifactRequest(name=f"artifacts/{digest}")
    assert wire.refused(lambda: wire.artifacts.GetArtifact(request)).code == CODE.NOT_FOUND


@pytest.mark.parametrize("kind", [pb.ARTIFACT_KIND_UNSPECIFIED, pb.ARTIFACT_KIND_REPORT, 77])
def test_a_kind_that_callers_do_not_make_is_refused(wire: Any, kind: int) -> None:
    request = pb.CreateArtifactRequest(kind=kind, manifest=manifest({"rows.jsonl": dataset(4)}))
    refused = wire.refused(lambda: wire.artifacts.CreateArtifact(request))
    assert (refused.code, refused.fields) == (CODE.INVALID_ARGUMENT, ["kind"])


def test_the_same_files_as_another_kind_are_refused(wire: Any) -> None:
    artifact = create(wire, {"rows.jsonl": dataset(5)})
    request = pb.CreateArtifactRequest(kind=pb.ARTIFACT_KIND_ADAPTER, manifest=artifact.manifest)
    refused = wire.refused(lambda: wire.artifacts.CreateArtifact(request))
    assert refused.code in (CODE.INVALID_ARGUMENT, CODE.ALREADY_EXISTS)


def test_pages_cover_everything_once_newest_first(start_server: Any, call: Any, tmp_path: Any) -> None:
    wire = call(start_server(tmp_path / "data"))
    names = [create(wire, {"rows.jsonl": dataset(number)}).name for number in range(7)]
    token, found, pages = "", [], 0
    while True:
        page = wire.artifacts.ListArtifacts(pb.ListArtifactsRequest(page_size=3, page_token=token))
        assert all(not artifact.manifest.files and artifact.file_count == 1 for artifact in page.artifacts)
        found += [artifact.name for artifact in page.artifacts]
        pages, token = pages + 1, page.next_page_token
        if not token:
            break
    assert (found, pages) == (names[::-1], 3)
    models = pb.ListArtifactsRequest(kind=pb.ARTIFACT_KIND_MODEL)
    assert not wire.artifacts.ListArtifacts(models).artifacts
    first = wire.artifacts.ListArtifacts(pb.ListArtifactsRequest(page_size=3))
    models.page_token = first.next_page_token
    for request in (models, pb.ListArtifactsRequest(page_token="x"), pb.ListArtifactsRequest(page_size=-1)):
        refused = wire.refused(lambda request=request: wire.artifacts.ListArtifacts(request))
        assert refused.code == CODE.INVALID_ARGUMENT


def test_a_range_outside_the_blob_is_refused(wire: Any) -> None:
    digest = wire.upload(b"0123456789" * 7)
    for offset, length in ((71, 0), (-1, 0), (0, 71), (60, 11)):
        request = pb.DownloadRequest(digest=digest, offset_bytes=offset, length_bytes=length)
        refused = wire.refused(lambda request=request: wire.artifacts.Download(request))
        assert refused.code == CODE.INVALID_ARGUMENT


def test_a_download_is_resumed_at_any_offset(wire: Any) -> None:
    data = random.Random(1).randbytes(3_000_001)
    digest = wire.upload(data)
    stream = wire.artifacts.Download(pb.DownloadRequest(digest=digest))
    part = next(stream).data
    stream.cancel()
    assert part + wire.download(digest, offset=len(part)) == data


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("GetArtifact", pb.GetArtifactRequest(name="uploads/x"), "name"),
        ("GetArtifact", pb.GetArtifactRequest(name="artifacts/x"), "name"),
        ("GetUpload", pb.GetUploadRequest(name="x"), "name"),
        ("FindMissing", pb.FindMissingRequest(), "digests"),
        ("FindMissing", pb.FindMissingRequest(digests=["sha256:XYZ"]), "digest"),
        ("CreateUpload", pb.CreateUploadRequest(digest="../../etc/passwd"), "digest"),
        ("CreateUpload", pb.CreateUploadRequest(digest="sha256:" + "1" * 64, size_bytes=-1), "size_bytes"),
        ("CreateUpload", pb.CreateUploadRequest(digest="sha256:" + "1" * 64, size_bytes=1 << 40), "size_bytes"),
    ],
)
def test_a_bad_field_is_named(wire: Any, method: str, request_: Any, field: str) -> None:
    refused = wire.refused(lambda: getattr(wire.artifacts, method)(request_))
    assert (refused.code, refused.fields) == (CODE.INVALID_ARGUMENT, [field])


def test_a_blob_that_the_store_has_lost_is_missing_and_can_be_sent_again(wire: Any, server: Any) -> None:
    data = dataset(23)
    artifact = create(wire, {"rows.jsonl": data})
    digest = artifact.manifest.files[0].digest
    [file] = server.data.rglob(digest.removeprefix("sha256:"))
    file.unlink()
    assert digest in wire.artifacts.FindMissing(pb.FindMissingRequest(digests=[digest])).missing_digests
    request = pb.CreateArtifactRequest(kind=artifact.kind, manifest=artifact.manifest)
    assert wire.refused(lambda: wire.artifacts.CreateArtifact(request)).missing == [digest]
    assert wire.upload(data) == digest
    assert wire.artifacts.CreateArtifact(request).name == artifact.name
    assert wire.download(digest) == data
