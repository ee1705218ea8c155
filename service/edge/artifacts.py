"""The Artifacts servicer: what may be asked of blobs and artifacts, and how the answers look."""

# ruff: noqa: N802 - the methods' names are the wire's

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from modelpress.digests import Digest
from modelpress.errors import InvalidRequest, MissingBlobs
from modelpress.manifests import MAX_FILES, ArtifactKind, FileEntry, Manifest
from modelpress.v1 import artifacts_pb2 as pb
from modelpress.v1 import artifacts_pb2_grpc as rpc
from service.edge.context import Context
from service.edge.names import artifact_digest, resource_id
from service.edge.paging import make_token, page_size, read_token
from service.edge.transfers import receive, send
from service.identity import current_caller
from service.state.artifacts import Artifact, ArtifactRepository, Summary
from service.state.uploads import Upload
from service.storage.store import ContentStore
from service.storage.uploads import UploadDesk
from service.threads import Threads

Inspector = Callable[[ArtifactKind, Manifest, ContentStore], dict[str, Any]]
"""Reads what an artifact is from its files, or refuses it: `service.intake.inspect_artifact`."""

KINDS: Mapping[int, ArtifactKind] = {
    pb.ARTIFACT_KIND_MODEL: ArtifactKind.MODEL,
    pb.ARTIFACT_KIND_ADAPTER: ArtifactKind.ADAPTER,
    pb.ARTIFACT_KIND_DATASET: ArtifactKind.DATASET,
    pb.ARTIFACT_KIND_REPORT: ArtifactKind.REPORT,
}
_WIRE_KINDS: Mapping[ArtifactKind, Any] = {kind: number for number, kind in KINDS.items()}


@dataclass(frozen=True)
class ArtifactParts:
    """What the servicer stands on."""

    store: ContentStore
    repository: ArtifactRepository
    uploads: UploadDesk
    inspector: Inspector
    threads: Threads


class ArtifactsServicer(rpc.ArtifactsServicer):
    def __init__(self, parts: ArtifactParts, *, clock: Callable[[], float] = time.time) -> None:
        self._parts = parts
        self._run = parts.threads.run
        self._clock = clock

    async def FindMissing(self, request: pb.FindMissingRequest, context: Context) -> pb.FindMissingResponse:
        if not 1 <= len(request.digests) <= MAX_FILES:
            raise InvalidRequest(f"{len(request.digests)} digests: give 1 to {MAX_FILES}", field="digests")
        wanted = [Digest(text) for text in request.digests]
        held = await self._run(self._held, current_caller().tenant, wanted)
        return pb.FindMissingResponse(missing_digests=[str(digest) for digest in wanted if digest not in held])

    async def CreateUpload(self, request: pb.CreateUploadRequest, context: Context) -> pb.Upload:
        digest = Digest(request.digest)
        return _upload(
            *await self._run(self._parts.uploads.create, current_caller().tenant, digest, request.size_bytes)
        )

    async def WriteUpload(self, request: AsyncIterator[pb.WriteUploadRequest], context: Context) -> pb.Upload:
        return _upload(*await receive(request, self._parts.uploads, current_caller().tenant, self._parts.threads))

    async def GetUpload(self, request: pb.GetUploadRequest, context: Context) -> pb.Upload:
        identifier = resource_id(request.name, "uploads")
        return _upload(*await self._run(self._parts.uploads.status, current_caller().tenant, identifier))

    async def AbortUpload(self, request: pb.AbortUploadRequest, context: Context) -> pb.AbortUploadResponse:
        identifier = resource_id(request.name, "uploads")
        await self._run(self._parts.uploads.abort, current_caller().tenant, identifier)
        return pb.AbortUploadResponse()

    async def CreateArtifact(self, request: pb.CreateArtifactRequest, context: Context) -> pb.Artifact:
        kind = KINDS.get(request.kind)
        if kind is None or kind is ArtifactKind.REPORT:
            raise InvalidRequest("kind is not MODEL, ADAPTER or DATASET: say what the files are", field="kind")
        return await self._run(self._create, current_caller().tenant, kind, request.manifest)

    async def GetArtifact(self, request: pb.GetArtifactRequest, context: Context) -> pb.Artifact:
        return await self._run(self._get, current_caller().tenant, artifact_digest(request.name, field="name"))

    async def ListArtifacts(self, request: pb.ListArtifactsRequest, context: Context) -> pb.ListArtifactsResponse:
        tenant, kind = current_caller().tenant, KINDS.get(request.kind)
        if request.kind and kind is None:
            raise InvalidRequest(f"kind {request.kind} is unknown to this server", field="kind")
        size, listing = page_size(request.page_size), ("artifacts", tenant, kind)
        after = read_token(request.page_token, listing)
        found = await self._run(self._parts.repository.page, tenant, kind=kind, after=after, limit=size + 1)
        last = found[size - 1] if len(found) > size else None
        return pb.ListArtifactsResponse(
            artifacts=[_listed(summary) for summary in found[:size]],
            next_page_token=make_token(last.created, str(last.digest), listing) if last else "",
        )

    async def Download(self, request: pb.DownloadRequest, context: Context) -> AsyncIterator[pb.DownloadResponse]:
        parts = self._parts
        async for response in send(request, parts.store, parts.repository, current_caller().tenant, parts.threads):
            yield response

    def _create(self, tenant: str, kind: ArtifactKind, message: pb.Manifest) -> pb.Artifact:
        """Check what is held, look into the files, then name them."""
        parts = self._parts
        manifest = _manifest(message)
        _check_held(manifest, self._held(tenant, [entry.digest for entry in manifest.files]))
        facts = parts.inspector(kind, manifest, parts.store)
        parts.store.put_bytes(manifest.to_json())
        return _artifact(parts.repository.create(tenant, Artifact(kind, manifest, facts, self._clock())))

    def _held(self, tenant: str, digests: Sequence[Digest]) -> dict[Digest, int]:
        """Sizes of the blobs that the tenant holds and the store still has: one that was lost is sent again."""
        held = self._parts.repository.held(tenant, digests)
        return {digest: size for digest, size in held.items() if self._parts.store.has(digest)}

    def _get(self, tenant: str, digest: Digest) -> pb.Artifact:
        return _artifact(self._parts.repository.get(tenant, digest))


def _check_held(manifest: Manifest, held: Mapping[Digest, int]) -> None:
    missing = dict.fromkeys(str(entry.digest) for entry in manifest.files if entry.digest not in held)
    if missing:
        raise MissingBlobs(list(missing))
    for entry in manifest.files:
        if held[entry.digest] != entry.size_bytes:
            raise InvalidRequest(
                f"file {entry.path!r} is declared with {entry.size_bytes} bytes, but its blob has "
                f"{held[entry.digest]}: correct the manifest",
                field="manifest.files.size_bytes",
            )


def _manifest(message: pb.Manifest) -> Manifest:
    return Manifest(tuple(FileEntry(file.path, file.size_bytes, Digest(file.digest)) for file in message.files))


def _upload(upload: Upload, received: int) -> pb.Upload:
    return pb.Upload(
        name=upload.name,
        digest=str(upload.digest),
        size_bytes=upload.size_bytes,
        received_bytes=received,
        complete=upload.complete,
        expire_time=_timestamp(upload.expires),
    )


def _artifact(artifact: Artifact) -> pb.Artifact:
    manifest = artifact.manifest
    files = [
        pb.File(path=entry.path, size_bytes=entry.size_bytes, digest=str(entry.digest)) for entry in manifest.files
    ]
    summary = Summary(manifest.digest, artifact.kind, manifest.size_bytes, len(files), artifact.created)
    message = _listed(summary)
    message.manifest.CopyFrom(pb.Manifest(files=files))
    return message


def _listed(summary: Summary) -> pb.Artifact:
    return pb.Artifact(
        name=f"artifacts/{summary.digest}",
        kind=_WIRE_KINDS[summary.kind],
        size_bytes=summary.size_bytes,
        create_time=_timestamp(summary.created),
        file_count=summary.file_count,
    )


def _timestamp(seconds: float) -> Timestamp:
    return Timestamp(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))
