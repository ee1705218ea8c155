"""The tiny artifacts' files, and a real store to put them into."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from modelpress.manifests import ArtifactKind, FileEntry, Manifest
from service.intake import inspect_artifact
from service.storage.store import ContentStore
from tests.service.intake.tiny import (
    ADAPTER_CONFIG,
    CONFIG,
    TOKENIZER,
    Files,
    Inspect,
    adapter_tensors,
    encode,
    safetensors,
    tensors_of,
)


@pytest.fixture
def base_files() -> Files:
    return {
        "config.json": encode(CONFIG),
        "model.safetensors": safetensors(tensors_of(CONFIG)),
        "tokenizer.json": encode(TOKENIZER),
    }


@pytest.fixture
def adapter_files() -> Files:
    return {
        "adapter_config.json": encode(ADAPTER_CONFIG),
        "adapter_model.safetensors": safetensors(adapter_tensors()),
    }


@pytest.fixture
def inspect(tmp_path: Path) -> Inspect:
    """Store the files and inspect them as an artifact."""
    store = ContentStore(str(tmp_path / "store"), scratch=tmp_path / "scratch")

    def run(kind: ArtifactKind, files: Mapping[str, bytes]) -> dict[str, Any]:
        entries = tuple(FileEntry(path, len(data), store.put_bytes(data)) for path, data in files.items())
        return inspect_artifact(kind, Manifest(entries), store)

    return run
