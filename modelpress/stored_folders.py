"""Folders in a content store, read and written in place: what a stage sees that streams instead of copying.

with source.stream("model.safetensors") as file:
    file.read_into(buffer)
    file.finish()                                   # DataLoss where the bytes are not those of the digest

with sink.write("model.safetensors") as write:
    write(buffer)
sink.entries["model.safetensors"].digest            # hashed while it was written
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from modelpress.manifests import FileEntry


class FileStream(Protocol):
    """A stored file, read once from its first byte to its last and hashed on the way."""

    def read_into(self, buffer: memoryview) -> None:
        """Fill `buffer`, of any size, with the next bytes. DataLoss where the file ends before."""

    def finish(self) -> None:
        """DataLoss unless the bytes read are the whole file and have its digest."""


class Source(Protocol):
    """A folder in the content store, read in place. Only bytes that `stream` or `verify` went over are verified."""

    @property
    def files(self) -> Mapping[str, FileEntry]:
        """By relative path."""

    def stream(self, path: str) -> AbstractContextManager[FileStream]: ...

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `offset` on; the range lies inside the file."""

    def verify(self, path: str) -> None:
        """Read the whole file: DataLoss where its bytes do not have its digest."""


class Sink(Protocol):
    """A new folder in the content store. Nothing of it is there before its file is complete and durable."""

    def keep(self, entry: FileEntry) -> bool:
        """Take a file that the store has already, under `entry.path`; False where the store does not have it."""

    def write(self, path: str) -> AbstractContextManager[Callable[[memoryview | bytes], None]]:
        """Call what is entered with one piece of the new file after the other. An error inside leaves nothing."""

    @property
    def entries(self) -> Mapping[str, FileEntry]:
        """Every complete file so far, by relative path."""

    def written(self) -> Source:
        """The complete files so far, to read again what was written or kept."""
