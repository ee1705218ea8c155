"""A digest is `sha256:` and 64 lower-case hex digits, whichever way the bytes come in."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelpress.digests import CHUNK_BYTES, Digest, digest_bytes, digest_file
from modelpress.errors import InvalidRequest

ABC = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
"""SHA-256 of `abc`, from FIPS 180-2."""


def test_the_published_example_has_its_digest() -> None:
    assert str(digest_bytes(b"abc")) == ABC
    assert digest_bytes(b"abc").hex == ABC[7:]


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 1])
def test_a_file_has_the_digest_of_its_bytes(tmp_path: Path, size: int) -> None:
    data = bytes(i % 251 for i in range(size))
    (tmp_path / "file").write_bytes(data)
    assert digest_file(tmp_path / "file") == digest_bytes(data)


@pytest.mark.parametrize(
    "text",
    ["", "sha256:", ABC[7:], ABC.upper(), ABC[:-1], ABC + "0", f" {ABC}", f"{ABC}\n", ABC.replace("sha256", "sha512")],
)
def test_anything_else_is_no_digest(text: str) -> None:
    with pytest.raises(InvalidRequest, match="64 lower-case hex digits"):
        Digest(text)


def test_digests_are_ordered_and_usable_as_keys() -> None:
    low, high = Digest("sha256:" + "0" * 64), Digest("sha256:" + "f" * 64)
    assert sorted([high, low]) == [low, high]
    assert {low: 1}[Digest("sha256:" + "0" * 64)] == 1
