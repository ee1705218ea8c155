"""The one writer of an upload: checks every chunk, hashes while it writes, publishes what has the declared digest."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import google_crc32c

from modelpress.digests import CHUNK_BYTES
from modelpress.errors import Conflict, DigestMismatch, InvalidRequest, OverLimit
from modelpress.pieces import pieces
from service.faults import fault_point
from service.state.uploads import Upload
from service.storage.blobs import storage_errors

MAX_CHUNK_BYTES = 2 << 20
SYNC_EVERY_BYTES = 64 << 20


class UploadWriter:
    """`upload` is complete after a `finish` that had all bytes; `hopeless` once its bytes can never become the blob.

    Calls may come from several threads, one after the other in effect.
    """

    def __init__(self, upload: Upload, file: Path, descriptor: int, *, publish: Callable[[Upload, Path], None]) -> None:
        self.upload = upload
        self.hopeless = False
        self._file = file
        self._descriptor = descriptor
        self._publish = publish
        self._lock = threading.Lock()
        self._closed = False
        self._sha256 = hashlib.sha256()
        self._received = 0
        self._hash_what_is_there()
        self._unsynced = 0

    @property
    def received(self) -> int:
        return self.upload.size_bytes if self.upload.complete else self._received

    def append(self, offset: int, data: bytes, crc32c: int) -> None:
        """Take one chunk; an empty one only where all bytes are there and nothing but `finish` is missing.

        InvalidRequest and OverLimit leave the bytes before it as they are, unless `hopeless`.
        """
        with self._lock, self._hopeless_when_full():
            if self._closed:
                raise Conflict("the stream has ended: this chunk was not stored")
            self._check(offset, data, crc32c)
            _write_all(self._descriptor, data)
            self._sha256.update(data)
            self._received += len(data)
            self._unsynced += len(data)
            if self._unsynced >= SYNC_EVERY_BYTES:
                self._sync()

    def finish(self) -> Upload:
        """Publish the blob where all bytes are there and right; DigestMismatch, and `hopeless`, where they are not."""
        with self._lock, self._hopeless_when_full():
            if self._received == self.upload.size_bytes and not self.upload.complete:
                self._check_digest()
                self._sync()
                self._publish(self.upload, self._file)
                self.upload = replace(self.upload, complete=True)
            return self.upload

    def close(self) -> None:
        """Sync what has arrived; nothing is taken after this."""
        with self._lock:
            self._closed = True
            if not (self.hopeless or self.upload.complete):
                self._sync()

    def _hash_what_is_there(self) -> None:
        while chunk := os.read(self._descriptor, CHUNK_BYTES):
            self._sha256.update(chunk)
            self._received += len(chunk)

    def _check(self, offset: int, data: bytes, crc32c: int) -> None:
        if len(data) > MAX_CHUNK_BYTES:
            raise OverLimit(
                f"the chunk has {len(data)} bytes: send at most {MAX_CHUNK_BYTES} at once",
                reason="CHUNK_TOO_LARGE",
                field="data",
            )
        if offset != self._received:
            raise InvalidRequest(
                f"offset_bytes is {offset}, but {self._received} bytes have arrived: go on at {self._received}",
                reason="OFFSET_MISMATCH",
                field="offset_bytes",
                metadata={"expected_offset_bytes": str(self._received)},
            )
        if not data and self._received < self.upload.size_bytes:
            raise InvalidRequest("the chunk is empty: send at least 1 byte", field="data")
        if google_crc32c.value(data) != crc32c:
            raise InvalidRequest(
                f"the chunk at {offset} does not have its CRC32C: it was damaged on the way, send it again",
                reason="CHECKSUM_MISMATCH",
                field="crc32c",
            )
        if offset + len(data) > self.upload.size_bytes:
            self.hopeless = True
            raise InvalidRequest(
                f"the chunk ends at {offset + len(data)}, past the declared size of {self.upload.size_bytes} bytes: "
                "create the upload again with the right size",
                reason="SIZE_EXCEEDED",
                field="size_bytes",
            )

    def _check_digest(self) -> None:
        found = self._sha256.hexdigest()
        if found != self.upload.digest.hex:
            self.hopeless = True
            raise DigestMismatch(
                f"the bytes have digest sha256:{found}, not the declared {self.upload.digest}: hash the file again and "
                "upload it anew",
                field="digest",
            )

    def _sync(self) -> None:
        fault_point("upload.write.unsynced")
        os.fsync(self._descriptor)
        self._unsynced = 0
        fault_point("upload.write.after")

    @contextmanager
    def _hopeless_when_full(self) -> Iterator[None]:
        try:
            with storage_errors():
                yield
        except OverLimit as error:
            self.hopeless = self.hopeless or error.reason == "STORAGE_FULL"
            raise


def _write_all(descriptor: int, data: bytes) -> None:
    for piece in pieces(data):
        while piece:
            piece = piece[os.write(descriptor, piece) :]  # noqa: PLW2901 - what is left of it
