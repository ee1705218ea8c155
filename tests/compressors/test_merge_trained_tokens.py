"""PEFT's trainable_token_indices: every row that was trained is merged to where PEFT puts it, or it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compressors.lora_merges import (
    PREFIX,
    QUERY,
    TOKENS,
    Bases,
    Bench,
    factors,
    save,
    tensors_of,
    train,
    write_adapter,
)
from tests.compressors.stored_models import Tensors

ROWS = f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta"
EMBEDDING = "model.embed_tokens.weight"


def adapter(folder: Path, rows: Tensors, indices: object) -> Path:
    lora = factors(QUERY, 32, 32) | factors(QUERY.replace("layers.0", "layers.1"), 32, 32)
    return write_adapter(folder, lora | rows, target_modules=["q_proj"], trainable_token_indices=indices)


@pytest.mark.parametrize(
    ("indices", "mentions"),
    [
        ([-1], ["-1", f"{TOKENS} tokens"]),
        ([3, -1], ["-1"]),
        ([TOKENS], [str(TOKENS)]),
        ([10**50], ["0000"]),
        ([3, 3], ["2 rows for 1 tokens"]),
        ({"embed_tokens": [5, -64]}, ["-64"]),
    ],
    ids=str,
)
def test_a_row_that_has_no_place_of_its_own_is_refused(
    indices: Any, mentions: list[str], bases: Bases, bench: Bench, tmp_path: Path
) -> None:
    count = len(indices["embed_tokens"] if isinstance(indices, dict) else indices)

    error = bench.refused(bases.folder("llama"), adapter(tmp_path / "a", {ROWS: torch.ones(count, 32)}, indices))

    assert all(mention in error.message for mention in (ROWS, *mentions)), error.message


@pytest.mark.parametrize("base", ["llama", "tied"])
@pytest.mark.parametrize("indices", [[1, 2], {"embed_tokens": [1]}, {"embed_tokens": [1], "lm_head": [1]}], ids=str)
def test_rows_that_were_trained_and_are_not_there_are_refused(
    indices: object, base: str, bases: Bases, bench: Bench, tmp_path: Path
) -> None:
    error = bench.refused(bases.folder(base), adapter(tmp_path / "a", {}, indices))

    assert "trainable_token_indices" in error.message, error.message


@pytest.mark.parametrize(
    ("base", "indices"),
    [("llama", [5, 1]), ("llama", {"embed_tokens": [1], "lm_head": [2, 3]}), ("tied", {"embed_tokens": [1, 9]})],
    ids=str,
)
def test_what_peft_saves_is_complete(base: str, indices: Any, bases: Bases, bench: Bench, tmp_path: Path) -> None:
    trained = train(bases.model(base), target_modules=["q_proj"], trainable_token_indices=indices)
    saved = save(trained, tmp_path / "adapter")
    rows = indices["embed_tokens"] if isinstance(indices, dict) else indices

    merged = bench.merge(bases.folder(base), saved)

    assert torch.equal(merged.tensors[EMBEDDING][rows], tensors_of(saved)[ROWS])
