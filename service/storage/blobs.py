"""Where blobs lie: a local folder, or an object store by URL. Only digests make paths.

<root>/blobs/sha256/ab/<hex>     complete blobs: written once, never changed
<root>/damaged/<hex>             what no longer had its digest, kept for the operator
<root>/staging/                  files on their way in, on the same file system, so that a rename publishes them
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import from_url

from modelpress.digests import CHUNK_BYTES, Digest
from modelpress.errors import InvalidRequest, NotFound, OverLimit, Unavailable

ReadInto = Callable[[memoryview], int]
"""Read the next bytes of a blob into the buffer, as many as come at once, and return their number; 0 at the end."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_log = logging.getLogger(__name__)


class Blobs(Protocol):
    """Complete blobs by digest. `staging` is a local folder; `publish` takes a closed, synced file out of it."""

    staging: Path

    def size(self, digest: Digest) -> int | None:
        """Bytes, or None where there is no such blob."""

    def read(self, digest: Digest, *, offset: int, length: int) -> Iterator[bytes]:
        """Exactly `length` bytes from `offset` on, in chunks of at most 1 MiB. NotFound where there is no such blob."""

    def reader(self, digest: Digest, *, offset: int, length: int) -> AbstractContextManager[ReadInto]:
        """The same bytes, copied once, into the caller's memory. NotFound where there is no such blob."""

    def publish(self, file: Path, digest: Digest) -> None:
        """Make `file` the blob, durable when this returns. The file is used up.

        A blob of that digest that is there already stays, unless its size is wrong: then it is damaged and replaced.
        """

    def set_aside(self, digest: Digest) -> None:
        """No blob afterwards; its bytes are kept as `damaged/<hex>` for the operator, and the log says so."""

    def delete(self, digest: Digest) -> None:
        """No blob afterwards, whether or not there was one."""


def open_blobs(url: str, scratch: Path) -> Blobs:
    """A path or `file://` URL: LocalBlobs; any URL that obstore knows (`s3://bucket/prefix`): ObjectBlobs."""
    parts = urlsplit(url)
    if parts.scheme in ("", "file"):
        return LocalBlobs(Path(unquote(parts.path) if parts.scheme else url))
    return ObjectBlobs(url, scratch / "staging")


class LocalBlobs:
    def __init__(self, root: Path) -> None:
        self._blobs = root / "blobs" / "sha256"
        self._damaged = root / "damaged"
        self.staging = root / "staging"
        for folder in (self._blobs, self.staging):
            folder.mkdir(parents=True, exist_ok=True)

    def size(self, digest: Digest) -> int | None:
        try:
            return self._path(digest).stat().st_size
        except FileNotFoundError:
            return None

    def read(self, digest: Digest, *, offset: int, length: int) -> Iterator[bytes]:
        try:
            source = self._path(digest).open("rb")
        except FileNotFoundError:
            raise NotFound(f"no blob {digest}") from None
        with source:
            source.seek(offset)
            while length > 0 and (chunk := source.read(min(CHUNK_BYTES, length))):
                length -= len(chunk)
                yield chunk

    @contextmanager
    def reader(self, digest: Digest, *, offset: int, length: int) -> Iterator[ReadInto]:
        try:
            source = self._path(digest).open("rb", buffering=0)
        except FileNotFoundError:
            raise NotFound(f"no blob {digest}") from None
        with source:
            os.posix_fadvise(source.fileno(), offset, length, os.POSIX_FADV_SEQUENTIAL)
            source.seek(offset)
            yield source.readinto

    def publish(self, file: Path, digest: Digest) -> None:
        target = self._path(digest)
        with storage_errors():
            if not target.parent.is_dir():
                target.parent.mkdir(exist_ok=True)
                sync_folder(self._blobs)
            if self.size(digest) == file.stat().st_size:
                file.unlink()
            else:
                file.rename(target)
            sync_folder(target.parent)

    def set_aside(self, digest: Digest) -> None:
        _log.error("a stored blob is damaged", extra={"fields": {"digest": str(digest)}})
        self._damaged.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):
            self._path(digest).rename(self._damaged / digest.hex)

    def delete(self, digest: Digest) -> None:
        self._path(digest).unlink(missing_ok=True)

    def _path(self, digest: Digest) -> Path:
        return self._blobs / digest.hex[:2] / digest.hex


class ObjectBlobs:
    """An object store. A put is atomic and durable by itself; large files go up in parts.

    Credentials come from the environment, as the store's own tools read them (`AWS_ACCESS_KEY_ID`, ...).
    """

    def __init__(self, url: str, staging: Path) -> None:
        options = {"timeout": timedelta(minutes=5), "allow_http": _plain_http_allowed()}
        try:
            self._store = from_url(url, client_options=options)
        except (ValueError, BaseError):
            raise InvalidRequest(
                "storage.store_url is no URL of an object store: use a folder, or e.g. s3://bucket/prefix",
                field="storage.store_url",
            ) from None
        self.staging = staging
        staging.mkdir(parents=True, exist_ok=True)

    def size(self, digest: Digest) -> int | None:
        with _remote_errors():
            try:
                return int(obstore.head(self._store, _key(digest))["size"])
            except FileNotFoundError:
                return None

    def read(self, digest: Digest, *, offset: int, length: int) -> Iterator[bytes]:
        for part in self._parts(digest, offset, length):
            for start in range(0, len(part), CHUNK_BYTES):
                yield bytes(part[start : start + CHUNK_BYTES])

    @contextmanager
    def reader(self, digest: Digest, *, offset: int, length: int) -> Iterator[ReadInto]:
        """One request, whose answer is taken from the network as it is read."""
        yield _PartReader(self._parts(digest, offset, length)).read

    def publish(self, file: Path, digest: Digest) -> None:
        if self.size(digest) != file.stat().st_size:
            with _remote_errors():
                obstore.put(self._store, _key(digest), file)
        file.unlink()

    def set_aside(self, digest: Digest) -> None:
        _log.error("a stored blob is damaged", extra={"fields": {"digest": str(digest)}})
        with _remote_errors(), suppress(FileNotFoundError):
            obstore.rename(self._store, _key(digest), f"damaged/{digest.hex}")

    def delete(self, digest: Digest) -> None:
        with _remote_errors(), suppress(FileNotFoundError):
            obstore.delete(self._store, _key(digest))

    def _parts(self, digest: Digest, offset: int, length: int) -> Iterator[memoryview]:
        if length == 0:
            return
        with _remote_errors():
            try:
                found = obstore.get(self._store, _key(digest), options={"range": (offset, offset + length)})
            except FileNotFoundError:
                raise NotFound(f"no blob {digest}") from None
            for part in found.stream(min_chunk_size=CHUNK_BYTES):
                yield memoryview(part)


class _PartReader:
    """Parts of any size, read into buffers of any other."""

    def __init__(self, parts: Iterator[memoryview]) -> None:
        self._parts = parts
        self._left = memoryview(b"")

    def read(self, buffer: memoryview) -> int:
        self._left = self._left or next(self._parts, self._left)
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count


def _key(digest: Digest) -> str:
    return f"blobs/sha256/{digest.hex[:2]}/{digest.hex}"


def _plain_http_allowed() -> bool:
    """obstore refuses http:// endpoints unless told; the variable is the one that its own documentation names."""
    return os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _remote_errors() -> Iterator[None]:
    """What obstore could not do after its own retries: the log says why, the caller may try again."""
    try:
        yield
    except BaseError as error:
        _log.exception("the object store failed")
        raise Unavailable(
            "the server's object store does not answer: try again later", reason="STORAGE_UNAVAILABLE"
        ) from error


@contextmanager
def storage_errors() -> Iterator[None]:
    """A full disk or quota becomes one clear OverLimit; every other OSError stays what it is."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise OverLimit(
                "the server's storage is full: nothing was kept of this write; free space there or ask its operator, "
                "then send it again",
                reason="STORAGE_FULL",
            ) from error
        raise
