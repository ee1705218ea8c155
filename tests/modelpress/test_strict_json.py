"""Untrusted JSON is one object, or a fault that says what it is instead."""

from __future__ import annotations

import pytest

from modelpress.strict_json import MAX_DEPTH, JsonError, read_object


def test_an_object_is_read_as_json_reads_it() -> None:
    assert read_object('{"a": [1, -2.5e3, true, null, "ü\\ud83d\\ude00"]}'.encode()) == {
        "a": [1, -2500.0, True, None, "ü😀"]
    }


@pytest.mark.parametrize(
    ("data", "mentions"),
    [
        (b"", "not valid JSON"),
        (b'{"a": 1} x', "column 10"),
        (b"[1]", "a list"),
        (b'"a"', "a str"),
        (b'{"a": {"b": 1, "b": 2}}', "'b' twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": ' + b"1" * 65 + b"}", "65 digits"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\uDFFF": 1}', "surrogate"),
        (b'{"a": "\xc3"}', "UTF-8"),
        (b"\xff\xfe{\x00}\x00", "UTF-8"),
        (b'\xef\xbb\xbf{"a": 1}', "not valid JSON"),
        (b'{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_every_surprise_is_a_fault_with_its_name(data: bytes, mentions: str) -> None:
    with pytest.raises(JsonError, match=mentions):
        read_object(data)


@pytest.mark.parametrize(("open_", "close"), [(b'{"a":', b"}"), (b"[", b"]"), (b'[{"a":', b"}]"), (b"[[],", b"]")])
@pytest.mark.parametrize("depth", [500, 900])
def test_no_value_is_so_deep_that_its_reader_gives_up(open_: bytes, close: bytes, depth: int) -> None:
    """`copy.deepcopy` follows every level with three calls of its own: Python's own limit comes too late."""
    with pytest.raises(JsonError, match="nested too deeply"):
        read_object(b'{"x":' + open_ * depth + b"1" + close * depth + b"}")


def test_the_depth_that_is_read_is_the_one_that_is_named() -> None:
    inside = [b"[" * levels + b"]" * levels for levels in (MAX_DEPTH - 1, MAX_DEPTH)]

    assert read_object(b'{"a":' + inside[0] + b"}")
    with pytest.raises(JsonError, match="nested"):
        read_object(b'{"a":' + inside[1] + b"}")
