"""Whatever bytes arrive, intake answers with facts or with one of its own errors, and never with a traceback."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from modelpress.errors import InvalidRequest
from modelpress.manifests import ArtifactKind
from tests.service.intake.tiny import Files, Inspect, encode, jsonl

ODD_VALUES: tuple[Any, ...] = (None, True, -1, 0, 1.5, 10**30, "", "x\x00", [], [[]], {}, {"a": []})


def corrupted(data: bytes, generator: random.Random) -> bytes:
    """A random byte replaced or removed, a random slice doubled, or the end cut off."""
    content = bytearray(data)
    at = generator.randrange(len(content))
    edit = generator.randrange(4)
    if edit == 0:
        content[at] = generator.randrange(256)
    elif edit == 1:
        del content[at]
    elif edit == 2:
        content[at:at] = content[at : at + 30]
    else:
        del content[at:]
    return bytes(content)


def answers(inspect: Inspect, kind: ArtifactKind, files: Files) -> bool:
    """True where the files are accepted for every stage; any exception but the documented ones fails the test."""
    try:
        return not inspect(kind, files).get("obstacle")
    except InvalidRequest as error:
        assert error.message
        assert len(error.message) < 2000
        return False


@pytest.mark.parametrize("kind", [ArtifactKind.MODEL, ArtifactKind.ADAPTER, ArtifactKind.DATASET])
def test_random_corruption_of_any_file_is_answered(
    inspect: Inspect, base_files: Files, adapter_files: Files, kind: ArtifactKind
) -> None:
    rows = jsonl(*({"text": f"t{i}", "label": i} for i in range(5)))
    sources = {
        ArtifactKind.MODEL: base_files,
        ArtifactKind.ADAPTER: adapter_files,
        ArtifactKind.DATASET: {"a.jsonl": rows},
    }
    files, generator = sources[kind], random.Random(5)
    outcomes = []
    for _ in range(80):
        path = generator.choice(sorted(files))
        outcomes.append(answers(inspect, kind, files | {path: corrupted(files[path], generator)}))
    assert not all(outcomes)


def configs(inspect: Inspect, kind: ArtifactKind, files: Files, path: str) -> int:
    """Every field of a config replaced by every odd value; returns how many were refused, or are for merges only."""
    config = json.loads(files[path])
    return sum(
        not answers(inspect, kind, files | {path: encode(config | {field: value})})
        for field in config
        for value in ODD_VALUES
    )


def test_settings_nested_as_deep_as_json_allows_are_answered(
    inspect: Inspect, base_files: Files, adapter_files: Files
) -> None:
    for depth in (10, 100, 500, 900, 980):
        nested = b'{"a": ' * depth + b"1" + b"}" * depth
        for kind, files, path in (
            (ArtifactKind.MODEL, base_files, "config.json"),
            (ArtifactKind.ADAPTER, adapter_files, "adapter_config.json"),
        ):
            answers(inspect, kind, files | {path: files[path][:-1] + b', "auto_mapping": ' + nested + b"}"})


def test_every_field_of_every_config_may_hold_anything(
    inspect: Inspect, base_files: Files, adapter_files: Files
) -> None:
    assert configs(inspect, ArtifactKind.MODEL, base_files, "config.json") > 50
    assert configs(inspect, ArtifactKind.MODEL, base_files, "tokenizer.json") > 5
    assert configs(inspect, ArtifactKind.ADAPTER, adapter_files, "adapter_config.json") > 20
