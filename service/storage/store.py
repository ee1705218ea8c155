"""The content store: bytes under their digest, folders under their manifest's digest.

    digest = store.put_bytes(b"{}")
    store.read_bytes(digest) == b"{}"
    store.fetch_folder(store.put_folder(folder), copy)      # copy holds the same files

A put is durable, atomic and idempotent: it returns when the blob survives a power cut, a reader never sees half of one,
and content that is there already is not written again. A blob that is read whole and found damaged is set aside: it is
missing from then on, so that the next put heals it. Threads and processes may share one store; each constructs its own
ContentStore from the URL.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from modelpress.digests import CHUNK_BYTES, Digest
from modelpress.errors import DataLoss, InvalidRequest, NotFound, OverLimit
from modelpress.manifests import FileEntry, Manifest, check_relative_path, scan_folder
from modelpress.pieces import pieces
from service.faults import fault_point
from service.storage.blobs import ReadInto, open_blobs, storage_errors
from service.storage.new_blobs import NEW_FILE, NewBlob

MAX_READ_BYTES = 256 << 20


class ContentStore:
    """`url`: a folder or an object store's URL. `scratch`: a local folder for files on their way to the latter."""

    def __init__(self, url: str, *, scratch: Path) -> None:
        self._blobs = open_blobs(url, scratch)

    @property
    def staging(self) -> Path:
        """The local folder from which `publish` takes files."""
        return self._blobs.staging

    def has(self, digest: Digest) -> bool:
        return self._blobs.size(digest) is not None

    def size(self, digest: Digest) -> int:
        """Bytes; NotFound where there is no such blob."""
        size = self._blobs.size(digest)
        if size is None:
            raise NotFound(f"no blob {digest}", reason="BLOB_NOT_FOUND")
        return size

    def holds(self, entry: FileEntry) -> bool:
        """Whether there is a blob of the entry's digest and size."""
        return self._blobs.size(entry.digest) == entry.size_bytes

    def reader(self, digest: Digest, *, offset: int, length: int) -> AbstractContextManager[ReadInto]:
        """Read `length` bytes from `offset` on into the caller's memory. NotFound where there is no such blob.

        Bytes are not verified: whoever has read all of them compares, and says `damaged`.
        """
        return self._blobs.reader(digest, offset=offset, length=length)

    def read(self, digest: Digest, *, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        """Chunks of at most 1 MiB. The range must lie inside the blob (InvalidRequest). Bytes are not verified."""
        size = self.size(digest)
        wanted = size - offset if length is None else length
        if not (0 <= offset <= size and 0 <= wanted <= size - offset):
            raise InvalidRequest(
                f"bytes {offset} to {offset + wanted} are not inside the blob of {size} bytes", field="offset"
            )
        return self._blobs.read(digest, offset=offset, length=wanted)

    def read_bytes(self, digest: Digest) -> bytes:
        """A whole blob of at most 256 MiB, verified: DataLoss where its bytes no longer have their digest."""
        if (size := self.size(digest)) > MAX_READ_BYTES:
            raise OverLimit(f"blob {digest} has {size} bytes: more than {MAX_READ_BYTES} are not read at once")
        data = b"".join(self.read(digest))
        if hashlib.sha256(data).hexdigest() != digest.hex:
            raise self.damaged(digest)
        return data

    def put_bytes(self, data: bytes) -> Digest:
        return self._put([data])

    def put_file(self, file: Path) -> Digest:
        """Copy a regular file in, whatever its size, with flat memory. A link is refused (OSError)."""
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW), "rb") as source:
            return self._put(iter(lambda: source.read(CHUNK_BYTES), b""))

    def put_folder(self, folder: Path) -> Manifest:
        """Every file of the folder, then the manifest's canonical JSON: the manifest's digest is its blob's digest."""
        manifest = scan_folder(folder)
        for entry in manifest.files:
            if not self.holds(entry) and self.put_file(folder / entry.path) != entry.digest:
                raise InvalidRequest(f"file {entry.path!r} changed while it was stored: store the folder again")
        self.put_bytes(manifest.to_json())
        return manifest

    def manifest(self, digest: Digest) -> Manifest:
        data = self.read_bytes(digest)
        try:
            return Manifest.from_json(data)
        except (ValueError, KeyError, TypeError):
            raise InvalidRequest(f"blob {digest} is not a manifest") from None

    def fetch_folder(self, manifest: Manifest, folder: Path) -> None:
        """Write the manifest's files below `folder`, each verified: DataLoss names the file whose bytes are wrong.

        Existing files are never overwritten (FileExistsError).
        """
        for entry in manifest.files:
            target = folder / check_relative_path(entry.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            with storage_errors():
                self._fetch(entry, target)

    def delete(self, digest: Digest) -> None:
        self._blobs.delete(digest)

    def publish(self, file: Path, digest: Digest) -> None:
        """Make a synced file of the `staging` folder a blob. The caller has verified its digest; the file goes."""
        fault_point("store.put.before")
        self._blobs.publish(file, digest)
        fault_point("store.put.after")

    @contextmanager
    def new_blob(self) -> Iterator[NewBlob]:
        """Write a blob piece by piece: it is in the store once the block has ended, and not at all where it raises."""
        staged = self.staging / f"put-{secrets.token_hex(12)}"
        try:
            with NewBlob(staged) as blob:
                yield blob
                blob.sync()
            self.publish(staged, blob.digest)
        finally:
            staged.unlink(missing_ok=True)

    def damaged(self, digest: Digest, path: str = "") -> DataLoss:
        """Set the blob aside, so that it is missing from now on: computed again, or sent again."""
        self._blobs.set_aside(digest)
        what = f"file {path!r}" if path else "blob"
        return DataLoss(
            f"stored {what} no longer had its digest {digest} and was set aside: try again where it was computed, "
            "upload it again where it was sent"
        )

    def _put(self, chunks: Iterable[bytes]) -> Digest:
        with self.new_blob() as blob:
            for chunk in chunks:
                blob.write(chunk)
        return blob.digest

    def _fetch(self, entry: FileEntry, target: Path) -> None:
        sha256 = hashlib.sha256()
        with os.fdopen(os.open(target, NEW_FILE, 0o600), "wb") as sink:
            for chunk in self.read(entry.digest):
                sha256.update(chunk)
                sink.writelines(pieces(chunk))
        if sha256.hexdigest() != entry.digest.hex:
            target.unlink()
            raise self.damaged(entry.digest, entry.path)
