"""A blob on its way into the store: hashed while it is written, and on its way to the disk while more of it comes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import TracebackType

from modelpress.digests import Digest
from modelpress.pieces import pieces
from service.faults import fault_point
from service.storage.blobs import storage_errors

NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
WRITE_BACK_BYTES = 16 << 20
"""How much is written before the kernel is told to begin with it: then little is left to wait for at the sync.
Measured with SHA-256 on one core (ext4, Linux 6.18): 1.0 s per GiB instead of 1.4 s."""


class NewBlob:
    """A new file, hashed piece by piece while the piece is in the processor's cache. Closed when its block ends."""

    def __init__(self, file: Path) -> None:
        self._sha256 = hashlib.sha256()
        self._begun_bytes = 0
        self.size_bytes = 0
        with storage_errors():
            self._descriptor = os.open(file, NEW_FILE, 0o600)

    def __enter__(self) -> NewBlob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    @property
    def digest(self) -> Digest:
        """Of what was written so far."""
        return Digest("sha256:" + self._sha256.hexdigest())

    def write(self, data: memoryview | bytes) -> None:
        """Append bytes, whatever their number. OverLimit where the disk is full."""
        with storage_errors():
            for piece in pieces(data):
                self._sha256.update(piece)
                _write_all(self._descriptor, piece)
                self.size_bytes += len(piece)
                self._begin_write_back()

    def sync(self) -> None:
        """Returns when every byte survives a power cut."""
        fault_point("store.put.unsynced")
        with storage_errors():
            os.fsync(self._descriptor)

    def _begin_write_back(self) -> None:
        """POSIX_FADV_DONTNEED begins to write dirty pages and returns; it drops clean ones, and these are none yet."""
        if (behind := self.size_bytes - self._begun_bytes) >= WRITE_BACK_BYTES:
            os.posix_fadvise(self._descriptor, self._begun_bytes, behind, os.POSIX_FADV_DONTNEED)
            self._begun_bytes = self.size_bytes


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
