"""Bytes in and bytes out: the streams of the Artifacts servicer.

The event loop only moves messages. While one chunk is checked, hashed and written in a thread, the next one is on its
way, and memory stays at a few chunks whatever the blob's size.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import google_crc32c

from modelpress.digests import Digest
from modelpress.errors import InvalidRequest, NotFound
from modelpress.v1 import artifacts_pb2 as pb
from service.edge.names import resource_id
from service.state.artifacts import ArtifactRepository
from service.state.uploads import Upload
from service.storage.store import ContentStore
from service.storage.upload_writer import UploadWriter
from service.storage.uploads import UploadDesk
from service.threads import Threads


async def receive(
    requests: AsyncIterator[pb.WriteUploadRequest], desk: UploadDesk, tenant: str, threads: Threads
) -> tuple[Upload, int]:
    """Append the stream's chunks to the upload that its first message names; finish it where all bytes are there."""
    first = await anext(aiter(requests), None)
    if first is None:
        raise InvalidRequest("the stream is empty: its first message names the upload and holds its first chunk")
    async with _writer(desk, tenant, resource_id(first.name, "uploads"), threads) as writer:
        if not writer.upload.complete:
            await _append_all(first, requests, writer, threads)
        return await threads.run(writer.finish), writer.received


@asynccontextmanager
async def _writer(desk: UploadDesk, tenant: str, identifier: str, threads: Threads) -> AsyncIterator[UploadWriter]:
    """The upload's writer; what it holds is released also when the call is cancelled in the middle."""
    manager = desk.write(tenant, identifier)
    entering = threads.run(manager.__enter__)
    try:
        yield await asyncio.shield(entering)
    finally:
        await asyncio.shield(asyncio.wait([entering]))
        if entering.exception() is None:
            await asyncio.shield(threads.run(manager.__exit__, None, None, None))


async def _append_all(
    first: pb.WriteUploadRequest,
    requests: AsyncIterator[pb.WriteUploadRequest],
    writer: UploadWriter,
    threads: Threads,
) -> None:
    pending = threads.run(writer.append, first.offset_bytes, first.data, first.crc32c)
    try:
        async for message in requests:
            await pending
            pending = threads.run(writer.append, message.offset_bytes, message.data, message.crc32c)
    finally:
        await pending


async def send(
    request: pb.DownloadRequest, store: ContentStore, repository: ArtifactRepository, tenant: str, threads: Threads
) -> AsyncIterator[pb.DownloadResponse]:
    """The range of a blob that the tenant holds, in messages of at most 1 MiB."""
    digest = Digest(request.digest)
    held = await threads.run(repository.held, tenant, [digest])
    if digest not in held:
        raise NotFound(f"no blob {digest}", reason="BLOB_NOT_FOUND", field="digest")
    async for response in threads.iterate(_responses(request, store, digest)):
        yield response


def _responses(request: pb.DownloadRequest, store: ContentStore, digest: Digest) -> Iterator[pb.DownloadResponse]:
    offset = request.offset_bytes
    for data in store.read(digest, offset=offset, length=request.length_bytes or None):
        yield pb.DownloadResponse(offset_bytes=offset, data=data, crc32c=google_crc32c.value(data))
        offset += len(data)
