"""Folders in the content store, read and written in place (`modelpress.stored_folders`), without a copy on the way.

    base = StoredFolder(store.manifest(digest), store)
    sink = StoreSink(store)
    sink.keep(base.files["tokenizer.json"])
    with base.stream("model.safetensors") as file, sink.write("model.safetensors") as write:
        file.read_into(buffer)
        write(buffer)
        file.finish()
    manifest = sink.finish()

Files that are complete and in no manifest yet stay in the store: nothing deletes a blob that no folder names, so that
a worker that was killed in the middle finds its finished files again and keeps them by their digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from modelpress.digests import CHUNK_BYTES
from modelpress.errors import DataLoss, InternalError, NotFound
from modelpress.manifests import FileEntry, Manifest, check_relative_path
from modelpress.stored_folders import FileStream
from service.faults import fault_point
from service.storage.blobs import ReadInto
from service.storage.store import ContentStore


class StoredFolder:
    """A `Source`: the files of a manifest, in a folder's store and in an object store alike."""

    def __init__(self, manifest: Manifest, store: ContentStore) -> None:
        self._store = store
        self._files = {entry.path: entry for entry in manifest.files}

    @property
    def files(self) -> Mapping[str, FileEntry]:
        return self._files

    @contextmanager
    def stream(self, path: str) -> Iterator[FileStream]:
        entry = self._entry(path)
        with self._store.reader(entry.digest, offset=0, length=entry.size_bytes) as read:
            yield _Stream(entry, read, self._store)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        entry = self._entry(path)
        end = offset + len(buffer)
        if not 0 <= offset <= end <= entry.size_bytes:
            raise InternalError(f"bytes {offset} to {end} are not inside file {path!r} of {entry.size_bytes} bytes")
        with self._store.reader(entry.digest, offset=offset, length=len(buffer)) as read:
            if not _filled(read, buffer):
                raise self._store.damaged(entry.digest, path)

    def verify(self, path: str) -> None:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        with self.stream(path) as file:
            for start in range(0, self._entry(path).size_bytes, CHUNK_BYTES):
                file.read_into(buffer[: self._entry(path).size_bytes - start])
            file.finish()

    def _entry(self, path: str) -> FileEntry:
        if path not in self._files:
            raise NotFound(f"there is no file {path!r} in the folder")
        return self._files[path]


class _Stream:
    """A `FileStream`. Bytes are hashed in pieces that the processor's cache still holds from reading them."""

    def __init__(self, entry: FileEntry, read: ReadInto, store: ContentStore) -> None:
        self._entry = entry
        self._read = read
        self._store = store
        self._sha256 = hashlib.sha256()
        self._position = 0

    def read_into(self, buffer: memoryview) -> None:
        if self._position + len(buffer) > self._entry.size_bytes:
            raise DataLoss(
                f"stored file {self._entry.path!r} ends at byte {self._entry.size_bytes}, and "
                f"{self._position + len(buffer)} were asked for"
            )
        for start in range(0, len(buffer), CHUNK_BYTES):
            piece = buffer[start : start + CHUNK_BYTES]
            if not _filled(self._read, piece):
                raise self._store.damaged(self._entry.digest, self._entry.path)
            self._sha256.update(piece)
        self._position += len(buffer)

    def finish(self) -> None:
        if self._position != self._entry.size_bytes:
            raise DataLoss(
                f"stored file {self._entry.path!r} is not verified: {self._position} of its {self._entry.size_bytes} "
                "bytes were read"
            )
        if self._sha256.hexdigest() != self._entry.digest.hex:
            raise self._store.damaged(self._entry.digest, self._entry.path)


class StoreSink:
    """A `Sink`: each file is hashed while it is written, and a blob of the store when its block ends."""

    def __init__(self, store: ContentStore) -> None:
        self._store = store
        self._entries: dict[str, FileEntry] = {}

    @property
    def entries(self) -> Mapping[str, FileEntry]:
        return self._entries

    def keep(self, entry: FileEntry) -> bool:
        if not self._store.holds(entry):
            return False
        self._add(entry)
        return True

    @contextmanager
    def write(self, path: str) -> Iterator[Callable[[memoryview | bytes], None]]:
        check_relative_path(path)
        with self._store.new_blob() as blob:
            yield blob.write
            fault_point("sink.file.before")
        self._add(FileEntry(path, blob.size_bytes, blob.digest))
        fault_point("sink.file.after")

    def written(self) -> StoredFolder:
        return StoredFolder(Manifest(tuple(self._entries.values())), self._store)

    def finish(self) -> Manifest:
        """Store the manifest of the complete files. Its digest is that of `put_folder` for the same files."""
        manifest = Manifest(tuple(self._entries.values()))
        self._store.put_bytes(manifest.to_json())
        return manifest

    def _add(self, entry: FileEntry) -> None:
        if entry.path in self._entries:
            raise InternalError(f"file {entry.path!r} was written twice")
        self._entries[entry.path] = entry


def _filled(read: ReadInto, buffer: memoryview) -> bool:
    """Fill the buffer; False where the blob ends before."""
    while buffer:
        if not (count := read(buffer)):
            return False
        buffer = buffer[count:]
    return True
