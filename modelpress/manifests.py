"""Manifests: a folder of files as a sorted list of path, size and digest; its own digest names the artifact.

>>> manifest = Manifest((FileEntry("config.json", 2, digest_bytes(b"{}")),))
>>> Manifest.from_json(manifest.to_json()) == manifest
True
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path, PurePosixPath

from modelpress.canonical import canonical_json
from modelpress.digests import Digest, digest_bytes, digest_file
from modelpress.errors import InvalidRequest, ModelpressError

MAX_FILES = 10_000
MAX_PATH_CHARACTERS = 512
_CONTROL = re.compile(r"[\x00-\x1f\x7f\\]")


class ArtifactKind(str, Enum):
    MODEL = "model"
    ADAPTER = "adapter"
    DATASET = "dataset"
    REPORT = "report"


def check_relative_path(path: str) -> str:
    """Return `path` if it stays inside any folder that it is joined to; else raise InvalidRequest.

    Allowed are relative POSIX paths without `.` or `..` parts, backslashes or control characters.
    """
    parts = path.split("/")
    if not path or len(path) > MAX_PATH_CHARACTERS or _CONTROL.search(path) or any(p in ("", ".", "..") for p in parts):
        raise InvalidRequest(
            f"path {path[:120]!r} is not a plain relative path: use names separated by '/', without '.' or '..' parts",
            field="manifest.files.path",
        )
    return path


@dataclass(frozen=True, order=True, slots=True)
class FileEntry:
    """One file: POSIX path relative to the artifact's root, size in bytes, digest of its content."""

    path: str
    size_bytes: int
    digest: Digest

    def __post_init__(self) -> None:
        check_relative_path(self.path)
        if self.size_bytes < 0:
            raise InvalidRequest(
                f"size of {self.path!r} is {self.size_bytes}: it must be >= 0", field="manifest.files.size_bytes"
            )


@dataclass(frozen=True)
class Manifest:
    """The files of an artifact. Sorted, unique, and no file where another needs a folder."""

    files: tuple[FileEntry, ...]

    def __post_init__(self) -> None:
        if not self.files:
            raise InvalidRequest("the manifest is empty: an artifact has at least one file", field="manifest.files")
        if len(self.files) > MAX_FILES:
            raise InvalidRequest(
                f"the manifest has {len(self.files)} files: at most {MAX_FILES} are allowed", field="manifest.files"
            )
        object.__setattr__(self, "files", tuple(sorted(self.files)))
        paths = {entry.path for entry in self.files}
        if len(paths) != len(self.files):
            twice = next(a.path for a, b in zip(self.files, self.files[1:], strict=False) if a.path == b.path)
            raise InvalidRequest(f"the manifest names {twice!r} twice", field="manifest.files")
        for path in paths:
            blocked = next((str(p) for p in PurePosixPath(path).parents if str(p) in paths), None)
            if blocked:
                raise InvalidRequest(
                    f"the manifest has {blocked!r} both as a file and as a folder", field="manifest.files"
                )

    @cached_property
    def digest(self) -> Digest:
        return digest_bytes(self.to_json())

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files)

    def to_json(self) -> bytes:
        """The canonical form: what `digest` is the SHA-256 of."""
        files = [{"path": f.path, "size_bytes": f.size_bytes, "digest": str(f.digest)} for f in self.files]
        return canonical_json({"files": files})

    @staticmethod
    def from_json(data: bytes) -> Manifest:
        files = json.loads(data)["files"]
        return Manifest(tuple(FileEntry(f["path"], f["size_bytes"], Digest(f["digest"])) for f in files))

    def entry(self, path: str) -> FileEntry | None:
        return next((entry for entry in self.files if entry.path == path), None)


def scan_folder(folder: Path) -> Manifest:
    """Hash every regular file below `folder`, hidden ones too; links and special files are refused."""
    if not folder.is_dir():
        raise InvalidRequest(f"{str(folder)!r} is not a folder")
    return Manifest(tuple(_entry(file, folder) for file in _regular_files(folder)))


def _entry(file: Path, folder: Path) -> FileEntry:
    return FileEntry(file.relative_to(folder).as_posix(), file.stat().st_size, digest_file(file))


def _regular_files(folder: Path) -> list[Path]:
    found = []
    for root, folders, names in os.walk(folder, onerror=_raise, followlinks=False):
        for name in [*folders, *names]:
            path = Path(root, name)
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                shown = path.relative_to(folder).as_posix()
                raise InvalidRequest(f"{shown!r} is a link or a special file: put a regular file there")
        found += [Path(root, name) for name in names]
    return found


def _raise(error: OSError) -> None:
    raise ModelpressError(f"cannot read folder: {error.strerror}") from error
