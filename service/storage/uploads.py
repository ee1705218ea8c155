"""Uploads: bytes appended in order, checked chunk by chunk, and made a blob once their digest is right.

    upload, received = desk.create(tenant, digest, size_bytes)
    with desk.write(tenant, upload.id) as writer:           # one writer per upload, across processes: Conflict
        for offset, data, crc32c in chunks:
            writer.append(offset, data, crc32c)
        upload = writer.finish()

The bytes lie in `<staging>/upload-<id>`; its size is what has arrived. The lock is the file's own, so that a killed
server leaves nothing locked. Where a stream ends early, what it sent is synced and kept until the upload expires or is
aborted; bytes that can never become the declared blob are deleted at once, with their upload.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from modelpress.digests import Digest
from modelpress.errors import Conflict, FailedPrecondition, InvalidRequest
from service.state.uploads import Upload, UploadRepository
from service.storage.store import ContentStore
from service.storage.upload_writer import UploadWriter

UPLOAD_PREFIX = "upload-"


@dataclass(frozen=True)
class UploadLimits:
    """Bytes, and seconds after its last stream at which an unfinished upload is deleted."""

    max_blob_bytes: int
    expiry_s: float


class UploadDesk:
    """All methods block: call them off the event loop."""

    def __init__(
        self,
        store: ContentStore,
        repository: UploadRepository,
        limits: UploadLimits,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._repository = repository
        self._limits = limits
        self._clock = clock

    def create(self, tenant: str, digest: Digest, size_bytes: int) -> tuple[Upload, int]:
        """The upload, new or unfinished, and how many of its bytes are durable. An empty blob is finished at once."""
        limit = self._limits.max_blob_bytes
        if not 0 <= size_bytes <= limit:
            raise InvalidRequest(
                f"size_bytes is {size_bytes}: this server takes 0 to {limit} bytes", field="size_bytes"
            )
        now = self._clock()
        expires = now + self._limits.expiry_s
        if not self._store.has(digest):
            self._repository.forget(tenant, digest)  # a blob that the store has lost is to be sent again
        upload = self._repository.create(tenant, digest, size_bytes=size_bytes, now=now, expires=expires)
        return self.status(tenant, upload.id)

    def status(self, tenant: str, identifier: str) -> tuple[Upload, int]:
        """The upload and how many of its bytes are durable.

        Where all of them are there and their writer was killed before it could say so, the upload is finished here.
        """
        upload = self._repository.get(tenant, identifier)
        received = upload.size_bytes if upload.complete else durable_bytes(self._file(upload))
        if received == upload.size_bytes and not upload.complete:
            with suppress(Conflict), self.write(tenant, identifier) as writer:
                upload = writer.finish()
        return upload, received

    def abort(self, tenant: str, identifier: str) -> None:
        """Delete the upload and its bytes. Conflict while somebody writes to it."""
        upload = self._repository.get(tenant, identifier)
        if upload.complete:
            raise FailedPrecondition("the upload is complete: its blob is stored, there is nothing to abort")
        with _locked(self._file(upload)):
            self._discard(upload)

    @contextmanager
    def write(self, tenant: str, identifier: str) -> Iterator[UploadWriter]:
        """The upload's only writer."""
        file = self._file(self._repository.get(tenant, identifier))
        with _locked(file) as descriptor:
            upload = self._repository.get(tenant, identifier)
            writer = UploadWriter(upload, file, descriptor, publish=self._publish)
            try:
                yield writer
            finally:
                try:
                    writer.close()
                finally:
                    self._settle(writer, file, descriptor)

    def expire(self, upload: Upload) -> bool:
        """Delete an upload whose time is over; False where somebody still writes to it."""
        with suppress(Conflict), _locked(self._file(upload)):
            self._discard(upload)
            return True
        return False

    def _publish(self, upload: Upload, file: Path) -> None:
        self._store.publish(file, upload.digest)
        self._repository.complete(upload, self._clock())

    def _settle(self, writer: UploadWriter, file: Path, descriptor: int) -> None:
        """After a stream: delete what is of no more use, give what can still be resumed its time."""
        if writer.hopeless:
            self._discard(writer.upload)
        elif writer.upload.complete:
            if is_at(file, descriptor):  # publishing has moved it away, and another writer may have made its own there
                file.unlink()
        else:
            self._repository.extend(writer.upload, self._clock() + self._limits.expiry_s)

    def _discard(self, upload: Upload) -> None:
        """The row first: a file without a row is garbage, a row without a file would promise a start at 0."""
        self._repository.delete(upload)
        self._file(upload).unlink(missing_ok=True)

    def _file(self, upload: Upload) -> Path:
        return self._store.staging / f"{UPLOAD_PREFIX}{upload.id}"


def durable_bytes(file: Path) -> int:
    """The file's size after everything up to it was synced; 0 where there is no file."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return 0
    try:
        size = os.fstat(descriptor).st_size
        os.fsync(descriptor)
        return size
    finally:
        os.close(descriptor)


@contextmanager
def _locked(file: Path) -> Iterator[int]:
    """The file's descriptor, made where there is none, with its exclusive lock; Conflict where somebody has that."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _busy() from None
        if not is_at(file, descriptor):
            raise _busy()  # published or deleted between opening and locking
        yield descriptor
    finally:
        os.close(descriptor)


def is_at(file: Path, descriptor: int) -> bool:
    """True where the open file still is the one at that path. Asked once: another writer may move it at any moment."""
    try:
        return os.path.samestat(file.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _busy() -> Conflict:
    return Conflict(
        "another writer has this upload: wait until it ends, read received_bytes again and go on from there",
        reason="UPLOAD_BUSY",
    )
