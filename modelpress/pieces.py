"""Bytes in the pieces in which they are written to disk."""

from __future__ import annotations

from collections.abc import Iterator

PIECE_BYTES = 256 << 10
"""Linux takes memory for the page cache in runs as long as an aligned write, and looks for them where memory is
fragmented: ext4 of Linux 6.18 took up to 9 times as long for writes of 1 MiB, and always 10 times for 2 MiB."""


def pieces(data: bytes | memoryview) -> Iterator[memoryview]:
    """Consecutive views of at most `PIECE_BYTES`; joined they are `data`."""
    view = memoryview(data)
    for start in range(0, len(view), PIECE_BYTES):
        yield view[start : start + PIECE_BYTES]
