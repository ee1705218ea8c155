"""Canonical JSON: one value, one byte string."""

from __future__ import annotations

import json

import pytest

from modelpress.canonical import canonical_json


def test_keys_are_sorted_at_every_depth_and_nothing_is_padded() -> None:
    assert canonical_json({"b": {"d": 1, "c": [True, None]}, "a": 0.5}) == b'{"a":0.5,"b":{"c":[true,null],"d":1}}'


def test_text_is_utf8_not_escaped() -> None:
    assert canonical_json("é\n") == b'"\xc3\xa9\\n"'


@pytest.mark.parametrize("value", [{"z": [1, {"y": "ü"}], "a": 1e-9}, [], "", 0, None])
def test_reading_and_writing_again_changes_nothing(value: object) -> None:
    data = canonical_json(value)
    assert canonical_json(json.loads(data)) == data


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [float("-inf")]])
def test_what_is_not_json_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="JSON"):
        canonical_json(value)
