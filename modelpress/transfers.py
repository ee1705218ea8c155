"""Uploads and downloads of blobs: in chunks with CRC32C, resumed after a cut, checked by digest.

upload_blob(connection, file, entry, meter)     resumes at GetUpload.received_bytes
download_blob(connection, entry, part, meter)   resumes at the bytes that `part` holds
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import google_crc32c
import grpc

from modelpress.connection import Connection
from modelpress.digests import CHUNK_BYTES, Digest
from modelpress.errors import AlreadyExists, Conflict, DataLoss, DigestMismatch, InvalidRequest, ModelpressError
from modelpress.manifests import FileEntry
from modelpress.pieces import pieces
from modelpress.retries import Patience
from modelpress.v1 import artifacts_pb2
from modelpress.views import TransferProgress

HELD = "BLOB_EXISTS"
"""CreateUpload's reason for a blob that the server holds already."""
BUSY = grpc.StatusCode.ABORTED
"""How the server refuses a second writer."""
RESUMABLE = ("OFFSET_MISMATCH", "CHECKSUM_MISMATCH")
"""WriteUpload's reasons that GetUpload cures: another writer was faster, or a chunk was damaged on the way."""


class Meter:
    """Adds up blobs to one TransferProgress. `show` may be called from gRPC's threads."""

    def __init__(self, total_bytes: int, show: Callable[[TransferProgress], None]) -> None:
        self._total_bytes = total_bytes
        self._finished_bytes = 0
        self._show = show

    def at(self, offset_bytes: int) -> None:
        """The present blob has come so far."""
        self._show(TransferProgress(self._finished_bytes + offset_bytes, self._total_bytes))

    def finish(self, entry: FileEntry) -> None:
        self._finished_bytes += entry.size_bytes
        self.at(0)


def upload_blob(connection: Connection, file: Path, entry: FileEntry, meter: Meter) -> None:
    """Send what the server does not hold yet; returns when it has verified the digest.

    Where another client sends the same blob, waits for it. Raises DigestMismatch where the file has changed since
    `entry` was made from it.
    """
    patience = connection.policy.patience(connection.policy.stream_patience_s)
    request = artifacts_pb2.CreateUploadRequest(digest=str(entry.digest), size_bytes=entry.size_bytes)
    try:
        upload: artifacts_pb2.Upload = connection.call_patiently("CreateUpload", request, patience)
        while not upload.complete:
            upload = _continue_upload(connection, upload, _Chunks(file, upload, meter), patience)
    except AlreadyExists as fault:
        if fault.reason != HELD:
            raise
    except DigestMismatch:
        raise DigestMismatch(f"{entry.path!r} changed while it was sent: send it when nothing writes to it") from None
    meter.finish(entry)


def _continue_upload(
    connection: Connection, upload: artifacts_pb2.Upload, chunks: _Chunks, patience: Patience
) -> artifacts_pb2.Upload:
    """One stream from `received_bytes` on; after a cut, and while another client writes, what has arrived."""
    fault: ModelpressError
    if 0 < upload.received_bytes == upload.size_bytes:
        fault, code = Conflict("another client sent this blob, and it is not stored yet: try again"), BUSY
    else:
        try:
            return _write(connection, chunks)
        except grpc.RpcError as error:
            fault = connection.translate(error)
            code = BUSY if fault.reason in RESUMABLE else error.code()
    if not patience.allows("WriteUpload", code):
        raise fault
    request = artifacts_pb2.GetUploadRequest(name=upload.name)
    after: artifacts_pb2.Upload = connection.call_patiently("GetUpload", request, patience)
    if after.received_bytes > upload.received_bytes:
        patience.renew()
    return after


def _write(connection: Connection, chunks: _Chunks) -> artifacts_pb2.Upload:
    try:
        upload: artifacts_pb2.Upload = connection.try_once("WriteUpload", iter(chunks))
    finally:
        chunks.raise_fault()
    if not upload.complete:
        raise DataLoss(f"the server took all bytes of {upload.digest} and did not store them: send them again")
    return upload


class _Chunks:
    """The messages of one WriteUpload.

    gRPC takes them in a thread of its own and would log an exception there, so a fault ends the stream and is kept.
    """

    def __init__(self, file: Path, upload: artifacts_pb2.Upload, meter: Meter) -> None:
        self._file = file
        self._upload = upload
        self._meter = meter
        self._fault: ModelpressError | None = None

    def raise_fault(self) -> None:
        if self._fault:
            raise self._fault

    def __iter__(self) -> Iterator[artifacts_pb2.WriteUploadRequest]:
        try:
            yield from self._messages()
        except OSError as error:
            self._fault = InvalidRequest(f"cannot read {self._file.name!r}: {error.strerror}")

    def _messages(self) -> Iterator[artifacts_pb2.WriteUploadRequest]:
        offset = self._upload.received_bytes
        with self._file.open("rb") as source:
            source.seek(offset)
            while True:
                data = source.read(min(CHUNK_BYTES, self._upload.size_bytes - offset))
                if not data and offset < self._upload.size_bytes:
                    self._fault = DigestMismatch(f"{self._file.name!r} is shorter than it was")
                    return
                yield artifacts_pb2.WriteUploadRequest(
                    name=self._upload.name, offset_bytes=offset, data=data, crc32c=google_crc32c.value(data)
                )
                offset += len(data)
                self._meter.at(offset)
                if offset >= self._upload.size_bytes:
                    return


def download_blob(connection: Connection, entry: FileEntry, part: Path, meter: Meter) -> None:
    """Fetch a blob into the file `part`, continuing what it holds.

    Raises DataLoss, and deletes `part`, where the bytes do not have the digest.
    """
    with part.open("a+b") as file:
        sink = _Sink(file, entry)
        _fill(connection, entry, sink, meter)
    if sink.digest != entry.digest:
        part.unlink()
        raise DataLoss(f"the bytes received for {entry.path!r} do not have its digest: fetch it again")
    meter.finish(entry)


class _Sink:
    """The end of a partial file, and the digest of all that it holds.

    Bytes are hashed as they arrive, while the next ones are on their way: hashing the whole file afterwards would take
    half as long again.
    """

    def __init__(self, file: BinaryIO, entry: FileEntry) -> None:
        if file.tell() > entry.size_bytes:
            file.truncate(0)
        file.seek(0)
        self._file = file
        self._entry = entry
        self._sha256 = hashlib.sha256()
        self.received = 0
        while chunk := file.read(CHUNK_BYTES):
            self._hash(chunk)

    @property
    def digest(self) -> Digest:
        return Digest("sha256:" + self._sha256.hexdigest())

    def append(self, message: artifacts_pb2.DownloadResponse) -> None:
        data = message.data
        if message.offset_bytes != self.received or self.received + len(data) > self._entry.size_bytes:
            raise DataLoss(f"the server sent bytes of another place of {self._entry.path!r}")
        if google_crc32c.value(data) != message.crc32c:
            raise DataLoss(f"a chunk of {self._entry.path!r} arrived damaged (CRC32C): fetch it again")
        self._file.writelines(pieces(data))
        self._hash(data)

    def _hash(self, data: bytes) -> None:
        self._sha256.update(data)
        self.received += len(data)


def _fill(connection: Connection, entry: FileEntry, sink: _Sink, meter: Meter) -> None:
    patience = connection.policy.patience(connection.policy.stream_patience_s)
    while sink.received < entry.size_bytes:
        request = artifacts_pb2.DownloadRequest(digest=str(entry.digest), offset_bytes=sink.received)
        try:
            for message in connection.stream_once("Download", request):
                sink.append(message)
                patience.renew()
                meter.at(sink.received)
        except grpc.RpcError as error:
            if not patience.allows("Download", error.code()):
                raise connection.translate(error) from None
        else:
            if sink.received < entry.size_bytes:
                raise DataLoss(f"the server holds {sink.received} of the {entry.size_bytes} bytes of {entry.path!r}")
