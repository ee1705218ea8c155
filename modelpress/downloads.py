"""An artifact's files into a folder: all of them or, after a cut, a part that the same call completes.

Files come under `.modelpress-partial/` first and move to their place once their digest is right. So a file at its
place is a whole one, and a folder with `.modelpress-partial/` in it is not complete.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from modelpress.connection import Connection
from modelpress.digests import digest_file
from modelpress.errors import FailedPrecondition, InvalidRequest
from modelpress.manifests import FileEntry, Manifest
from modelpress.output import REPORT
from modelpress.transfers import Meter, download_blob
from modelpress.views import TransferProgress

PARTIAL = ".modelpress-partial"


def download_files(
    connection: Connection, manifest: Manifest, folder: Path, show: Callable[[TransferProgress], None]
) -> None:
    """Make `folder` hold exactly the files of `manifest`.

    Raises FailedPrecondition, with nothing changed, where it holds anything else; InvalidRequest where it cannot be
    written. Nothing outside `folder` is written: its manifest has plain relative paths only, and links are refused.
    """
    held = _held_files(folder, manifest)
    partial = folder / PARTIAL
    meter = Meter(manifest.size_bytes, show)
    try:
        partial.mkdir(parents=True, exist_ok=True)
        for entry in manifest.files:
            if entry.path in held:
                meter.finish(entry)
            else:
                _fetch(connection, entry, folder, meter)
        shutil.rmtree(partial)
    except OSError as error:
        raise InvalidRequest(f"cannot write to {str(folder)!r}: {error.strerror}") from None


def check_folder(folder: Path) -> None:
    """Raise FailedPrecondition where `folder` can hold no output, so that nobody waits for one in vain.

    A folder with an output in it, or a part of one, passes here: `download_files` knows whether it is the same.
    """
    if folder.is_dir() and any(folder.iterdir()) and not ((folder / PARTIAL).is_dir() or (folder / REPORT).is_file()):
        raise FailedPrecondition(f"{str(folder)!r} holds other files: name a new or empty folder")


def _fetch(connection: Connection, entry: FileEntry, folder: Path, meter: Meter) -> None:
    part = folder / PARTIAL / entry.digest.hex
    target = folder / entry.path
    download_blob(connection, entry, part, meter)
    target.parent.mkdir(parents=True, exist_ok=True)
    part.replace(target)


def _held_files(folder: Path, manifest: Manifest) -> set[str]:
    """Paths of the manifest whose right bytes are there already."""
    if not folder.exists() and not folder.is_symlink():
        return set()
    if not folder.is_dir():
        raise FailedPrecondition(f"{str(folder)!r} is not a folder: name a new or empty one")
    held = set()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        entry = manifest.entry(name)
        if path.is_symlink() or (path.is_file() and not _belongs(path, name, entry)):
            raise FailedPrecondition(
                f"{str(folder)!r} holds {name!r}, which is not of this output: name a new or empty folder"
            )
        if path.is_file() and entry is not None:
            held.add(name)
    return held


def _belongs(path: Path, name: str, entry: FileEntry | None) -> bool:
    if name.startswith(PARTIAL + "/"):
        return True
    return entry is not None and path.stat().st_size == entry.size_bytes and digest_file(path) == entry.digest
