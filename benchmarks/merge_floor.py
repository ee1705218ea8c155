"""`python -m benchmarks.merge_floor FROM TO`: copy the files of a folder, hash them and sync them, and nothing else.

One pass, hashed on the way: faster than `cp`, `sync` and `sha256sum` or `openssl dgst` one after the other.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from benchmarks.processes import clock, say

PIECE_BYTES = 256 << 10
"""What modelpress writes at once too; larger pieces are slower (`modelpress/pieces.py`)."""


def main(from_folder: str, to_folder: str) -> None:
    begun = clock()
    Path(to_folder).mkdir()
    for file in Path(from_folder).iterdir():
        copy(file, Path(to_folder) / file.name)
    say(begun)


def copy(file: Path, target: Path) -> str:
    """The SHA-256 of what was copied."""
    sha256 = hashlib.sha256()
    buffer = memoryview(bytearray(PIECE_BYTES))
    with file.open("rb", buffering=0) as source, target.open("wb", buffering=0) as sink:
        while count := source.readinto(buffer):
            sha256.update(buffer[:count])
            sink.write(buffer[:count])
        os.fsync(sink.fileno())
    return sha256.hexdigest()


if __name__ == "__main__":
    main(*sys.argv[1:])
