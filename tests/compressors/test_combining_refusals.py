"""Several adapters that mean nothing together are refused: their names, the tensor, both shapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compressors.lora_merges import Bases, Bench, save, train

LINEAR = ["q_proj", "down_proj"]


@pytest.mark.parametrize(
    "fields",
    [
        {"modules_to_save": ["norm"]},
        {"trainable_token_indices": [3]},
        {"bias": "all"},
    ],
    ids=str,
)
def test_two_adapters_that_replace_one_tensor_are_refused(fields, bases: Bases, bench: Bench, tmp_path) -> None:
    adapters = [
        save(train(bases.model("biased"), seed=seed, target_modules=LINEAR, **fields), tmp_path / str(seed))
        for seed in (1, 2)
    ]

    message = bench.refused(bases.folder("biased"), *adapters).message

    assert all(part in message for part in ("'one'", "'two'", "replace", "model.")), message


def test_rows_and_a_tied_head_of_two_adapters_are_refused(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    """The rows of the one are the head's of the other: together they are no sum of changes of files."""
    rows = train(bases.model("tied"), target_modules=["q_proj"], trainable_token_indices=[3])
    head = train(bases.model("tied"), seed=2, target_modules=["lm_head"])
    adapters = [save(model, tmp_path / str(number)) for number, model in enumerate((rows, head))]

    message = bench.refused(bases.folder("tied"), *adapters).message

    assert all(part in message for part in ("'one'", "'two'", "lm_head.weight", "rows")), message


def test_adapters_that_grow_the_vocabulary_differently_are_refused(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    adapters = []
    for tokens in (66, 70):
        model = bases.model("tied")
        model.resize_token_embeddings(tokens)
        trained = train(model, target_modules=["q_proj"])
        adapters.append(save(trained, tmp_path / str(tokens), save_embedding_layers=True))

    message = bench.refused(bases.folder("tied"), *adapters).message

    assert all(part in message for part in ("lm_head.weight", "[66, 32]", "[70, 32]")), message
