"""Untrusted JSON is one object, or a fault that says what it is instead."""

from __future__ import annotations

import pytest

from modelpress.strict_json import JsonError, read_object


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
