"""A header that passes lies about nothing; one that does not is refused in a sentence, quickly and in little memory."""

from __future__ import annotations

import json
import pickle
import random
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from modelpress.errors import InvalidModel
from modelpress.safetensors_header import CURES, MAX_HEADER_BYTES, Header, read_header


def read(data: bytes, name: str = "model.safetensors") -> Header:
    return read_header(lambda offset, length: data[offset : offset + length], size_bytes=len(data), name=name)


def file_of(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(shape: list[Any], begin: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


DATA = bytes(range(32))
TWICE = (
    b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"a":{"dtype":"F32","shape":[4],"data_offsets":[16,32]}}'
)


def refuse(data: bytes) -> InvalidModel:
    with pytest.raises(InvalidModel) as caught:
        read(data)
    assert caught.value.message.startswith("model.safetensors ")
    assert caught.value.reason in CURES
    return caught.value


def test_what_the_library_writes_is_read_back() -> None:
    arrays = {"b": np.zeros((2, 3), np.float32), "a": np.zeros(5, np.int8), "scalar": np.array(1.0)}
    data = save(arrays, metadata={"format": "pt"})
    header = read(data)
    assert {t.name: t.shape for t in header.tensors} == {name: array.shape for name, array in arrays.items()}
    for found in header.tensors:
        stored = data[header.data_start + found.begin : header.data_start + found.end]
        assert stored == arrays[found.name].tobytes()
        assert found.elements == arrays[found.name].size


def test_empty_tensors_and_packed_dtypes_have_their_exact_sizes() -> None:
    layout = {"empty": tensor([0, 4], 0, 0), "packed": tensor([3, 4], 0, 6, "F4"), "six": tensor([4], 6, 9, "F6_E2M3")}
    assert [t.end - t.begin for t in read(file_of(layout, DATA[:9])).tensors] == [0, 6, 3]
    assert "lies" in refuse(file_of({"odd": tensor([3], 0, 1, "F4")}, DATA[:1])).message


@pytest.mark.parametrize(
    ("data", "reason", "mentions"),
    [
        (b"", "EMPTY_FILE", "empty"),
        (b"abc", "TRUNCATED_FILE", "3 bytes"),
        (file_of(b"{}", length=10**18), "TRUNCATED_FILE", str(10**18)),
        (file_of(b"{}", length=4096), "TRUNCATED_FILE", "4096"),
        (file_of(b"{}"), "BAD_SAFETENSORS", "no tensors"),
        (file_of({"__metadata__": {"format": "pt"}}), "BAD_SAFETENSORS", "no tensors"),
        (file_of(b"[1, 2]"), "NOT_SAFETENSORS", "no safetensors file"),
        (file_of(b'{"\xff": 1}'), "BAD_SAFETENSORS", "UTF-8"),
        (file_of(b'{"a": }'), "BAD_SAFETENSORS", "JSON"),
        (file_of(b'{"a": ' + b"[" * 5000), "BAD_SAFETENSORS", "nested"),
        (file_of(TWICE, DATA), "BAD_SAFETENSORS", "'a' twice"),
        (file_of({"a": tensor([4], 0, 16), "b": tensor([4], 0, 16)}, DATA[:16]), "BAD_SAFETENSORS", "overlap"),
        (file_of({"a": tensor([4], 0, 16), "b": tensor([4], 8, 24)}, DATA[:24]), "BAD_SAFETENSORS", "'a' and 'b'"),
        (file_of({"a": tensor([2], 0, 8), "b": tensor([2], 24, 32)}, DATA), "BAD_SAFETENSORS", "gap of 16"),
        (file_of({"a": tensor([4], 16, 32)}, DATA), "BAD_SAFETENSORS", "gap of 16"),
        (file_of({"a": tensor([8], 0, 32)}, DATA + b"PK"), "BAD_SAFETENSORS", "2 bytes after"),
        (file_of({"a": tensor([8], 0, 32)}, DATA[:20]), "TRUNCATED_FILE", "holds 20"),
        (file_of({"a": tensor([1000], 0, 32)}, DATA), "BAD_SAFETENSORS", "takes 4000 bytes"),
        (file_of({"a": tensor([2**33, 2**33], 0, 32)}, DATA), "BAD_SAFETENSORS", "lies"),
        (file_of({"a": tensor([10**60] * 16, 0, 32)}, DATA), "BAD_SAFETENSORS", "lies"),
        (file_of({"a": tensor([1] * 17, 0, 4)}, DATA[:4]), "BAD_SAFETENSORS", "shape"),
        (file_of({"a": tensor([-8], 0, 32)}, DATA), "BAD_SAFETENSORS", "shape"),
        (file_of({"a": tensor([8.0], 0, 32)}, DATA), "BAD_SAFETENSORS", "shape"),
        (file_of({"a": tensor([True], 0, 4)}, DATA[:4]), "BAD_SAFETENSORS", "shape"),
        (file_of({"a": tensor([4], 16, 0)}, DATA), "BAD_SAFETENSORS", "data_offsets"),
        (file_of({"a": tensor([4], -16, 0)}, DATA), "BAD_SAFETENSORS", "data_offsets"),
        (file_of({"a": tensor([4], 0, 16, "F33")}, DATA[:16]), "BAD_SAFETENSORS", "'F33'"),
        (file_of({"a": tensor([4], 0, 16, ["F32"])}, DATA[:16]), "BAD_SAFETENSORS", "dtype"),
        (file_of({"a": {"dtype": "F32", "shape": [0]}}), "BAD_SAFETENSORS", "data_offsets"),
        (file_of({"a": {**tensor([0], 0, 0), "more": 1}}), "BAD_SAFETENSORS", "exactly"),
        (file_of({"a": [1]}), "BAD_SAFETENSORS", "exactly"),
        (file_of({"": tensor([0], 0, 0)}), "BAD_SAFETENSORS", "name"),
        (file_of({"a\x1b[31m": tensor([0], 0, 0)}), "BAD_SAFETENSORS", "name"),
        (file_of({"a" * 600: tensor([0], 0, 0)}), "BAD_SAFETENSORS", "name"),
        (file_of(b'{"\\ud800": 1}'), "BAD_SAFETENSORS", "surrogate"),
        (file_of(b'{"a": NaN}'), "BAD_SAFETENSORS", "NaN"),
        (file_of(b'{"a": 1e999}'), "BAD_SAFETENSORS", "too large"),
        (file_of(b'{"a": ' + b"9" * 100 + b"}"), "BAD_SAFETENSORS", "100 digits"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "NOT_SAFETENSORS", "HTML"),
        (b"\n\n<HTML>", "NOT_SAFETENSORS", "HTML"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "NOT_SAFETENSORS", "Git LFS"),
        (b"GGUF\x03\x00\x00\x00\x00\x00\x00\x00", "NOT_SAFETENSORS", "GGUF"),
        (b"\x89HDF\r\n\x1a\n0000", "NOT_SAFETENSORS", "HDF5"),
        (b"PK\x03\x04" + bytes(60), "PICKLE_FILE", "pickle"),
        (pickle.dumps({"a": 1}), "PICKLE_FILE", "save_file"),
        (pickle.dumps({"a": 1}, protocol=2), "PICKLE_FILE", "save_file"),
    ],
)
def test_every_kind_of_bad_file_is_named_as_what_it_is(data: bytes, reason: str, mentions: str) -> None:
    error = refuse(data)
    assert error.reason == reason
    assert mentions in error.message


def test_a_header_length_that_looks_like_a_pickle_is_none() -> None:
    for length in (0x0280, 0x0480):
        body = json.dumps({"a": tensor([8], 0, 32)}).encode().ljust(length)
        data = file_of(body, DATA)
        assert data[:2] in (b"\x80\x02", b"\x80\x04")
        assert read(data).tensors[0].name == "a"


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":' + b"[" * (MAX_HEADER_BYTES // 2),
        b'{"a":' * (MAX_HEADER_BYTES // 6),
        b'{"a":[' + b"0," * (MAX_HEADER_BYTES // 3) + b"0]}",
        b'{"a":' + b"1" * (MAX_HEADER_BYTES // 2) + b"}",
        b'{"' + b"\\u0041" * (MAX_HEADER_BYTES // 8) + b'":1}',
        b"{" + b" " * MAX_HEADER_BYTES,
    ],
)
def test_a_header_made_to_be_costly_takes_little_memory(body: bytes) -> None:
    data = file_of(body)
    tracemalloc.start()
    refuse(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * MAX_HEADER_BYTES


def test_at_most_the_header_is_read_whatever_the_file_claims() -> None:
    asked = []

    def source(offset: int, length: int) -> bytes:
        asked.append(length)
        return (struct.pack("<Q", 1 << 40) + b"{")[offset : offset + length]

    with pytest.raises(InvalidModel, match="at most"):
        read_header(source, size_bytes=1 << 50, name="x")
    assert sum(asked) <= 512


def mutated(data: bytes, generator: random.Random) -> bytes:
    """One to four random edits: a byte replaced, removed, doubled, or a digit changed, or the end cut off."""
    content = bytearray(data)
    for _ in range(generator.randrange(1, 5)):
        at = generator.randrange(len(content))
        edit = generator.randrange(5)
        if edit == 0:
            content[at] = generator.randrange(256)
        elif edit == 1 and len(content) > 1:
            del content[at]
        elif edit == 2:
            content[at:at] = content[at : at + generator.randrange(1, 20)]
        elif edit == 3:
            digits = [i for i, byte in enumerate(content) if 48 <= byte < 58] or [at]
            content[generator.choice(digits)] = 48 + generator.randrange(10)
        else:
            del content[generator.randrange(1, len(content) + 1) :]
    return bytes(content)


def test_random_corruption_is_refused_in_a_sentence_or_harmless() -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    generator = random.Random(20)
    good = save({"a.weight": np.ones((3, 4), np.float32), "b": np.ones(7, np.float16), "c": np.ones(2, np.int64)})
    refused = 0
    for _ in range(4000):
        data = mutated(good, generator)
        try:
            header = read(data)
        except InvalidModel as error:
            assert error.reason in CURES
            refused += 1
            continue
        assert header.tensors[-1].end == len(data) - header.data_start
        try:
            loaded = load(data)
        except (SafetensorError, KeyError, ValueError, TypeError):
            continue
        assert {name: array.shape for name, array in loaded.items()} == {t.name: t.shape for t in header.tensors}
    assert refused > 2000
