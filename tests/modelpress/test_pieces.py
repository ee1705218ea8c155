"""Pieces are the bytes, in order, each small enough to be written fast."""

import random

import pytest

from modelpress.pieces import PIECE_BYTES, pieces


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 17])
def test_joined_they_are_the_data(size):
    data = random.Random(size).randbytes(size)
    found = list(pieces(data))
    assert b"".join(found) == data
    assert all(1 <= len(piece) <= PIECE_BYTES for piece in found)
