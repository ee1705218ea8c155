"""Digests: what names every blob, manifest and artifact.

>>> str(digest_bytes(b""))
'sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855'
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from modelpress.errors import InvalidRequest

CHUNK_BYTES = 1 << 20
_PATTERN = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, order=True, slots=True)
class Digest:
    """`sha256:` and 64 lower-case hex digits. Valid once built."""

    text: str

    def __post_init__(self) -> None:
        if not _PATTERN.fullmatch(self.text):
            raise InvalidRequest(
                f"digest {self.text[:80]!r} is not 'sha256:' and 64 lower-case hex digits", field="digest"
            )

    @property
    def hex(self) -> str:
        return self.text.removeprefix("sha256:")

    def __str__(self) -> str:
        return self.text


def digest_bytes(data: bytes) -> Digest:
    return Digest("sha256:" + hashlib.sha256(data).hexdigest())


def digest_file(file: Path) -> Digest:
    """Hash a file in chunks: memory stays flat whatever its size."""
    sha256 = hashlib.sha256()
    with file.open("rb") as source:
        while chunk := source.read(CHUNK_BYTES):
            sha256.update(chunk)
    return Digest("sha256:" + sha256.hexdigest())
