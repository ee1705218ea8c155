"""Batches: every row once per epoch, in an order that only the seed decides; nothing cut or relabelled silently."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

from compressors.batches import NO_LABEL, Examples, collate, encode, ordered_batches, shuffled_batches, spread
from compressors.folders import load_model, load_tokenizer
from modelpress.datasets import LabelledTexts
from modelpress.errors import InvalidDataset


def examples(*lengths: int) -> Examples:
    return Examples(
        token_ids=tuple(tuple(range(1, length + 1)) for length in lengths),
        label_ids=tuple(index % 2 for index in range(len(lengths))),
        input_names=("input_ids", "attention_mask", "token_type_ids"),
        pad_id=0,
        max_length=16,
        truncated=0,
    )


def test_an_epoch_holds_every_row_once() -> None:
    rows = examples(*(1 + index % 7 for index in range(50)))
    epochs = list(islice(shuffled_batches(rows, batch_size=8, seed=3), 14))

    assert sorted(sum(epochs[:7], ())) == sorted(sum(epochs[7:], ())) == list(range(50))
    assert epochs[:7] != epochs[7:]
    assert sorted(map(len, epochs[:7])) == [2, 8, 8, 8, 8, 8, 8]


def test_the_order_follows_from_the_seed_alone() -> None:
    rows = examples(*(1 + index % 7 for index in range(50)))
    first, again, other = (list(islice(shuffled_batches(rows, batch_size=8, seed=s), 10)) for s in (1, 1, 2))

    assert first == again != other


def test_a_batch_is_padded_on_the_right_to_its_longest_row() -> None:
    batch = collate(examples(3, 1, 2), (0, 2))

    assert batch.inputs["input_ids"].tolist() == [[1, 2, 3], [1, 2, 0]]
    assert batch.inputs["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.inputs["token_type_ids"].tolist() == [[0, 0, 0], [0, 0, 0]]
    assert tuple(batch.inputs) == ("input_ids", "attention_mask", "token_type_ids")
    assert batch.labels.tolist() == [0, 0]


def test_measuring_batches_hold_every_row_shortest_first() -> None:
    assert list(ordered_batches(examples(3, 1, 2), batch_size=2)) == [(1, 2), (0,)]


def test_spread_keeps_rows_evenly_in_order() -> None:
    rows = spread(examples(1, 2, 3, 4, 5, 6), limit=3)

    assert [len(ids) for ids in rows.token_ids] == [1, 3, 5]
    assert spread(rows, limit=3) is rows


def test_texts_are_cut_at_the_limit_and_counted(bert: Path) -> None:
    texts = LabelledTexts(("w0", " ".join(["w1"] * 30), "w2 w3"), ("benign", "injection", "benign"))
    config, tokenizer = load_model(bert).config, load_tokenizer(bert)
    cut = encode(texts, tokenizer, config=config, max_length=8)
    at_positions = encode(texts, tokenizer, config=config, max_length=500)

    assert [len(ids) for ids in cut.token_ids] == [3, 8, 4]
    assert (cut.truncated, cut.max_length) == (1, 8)
    assert cut.token_ids[1][-1] == 3  # [SEP] still closes a text that was cut
    assert (at_positions.truncated, at_positions.max_length) == (1, 24)


def test_labels_go_by_name(bert: Path) -> None:
    config, tokenizer = load_model(bert).config, load_tokenizer(bert)
    config.label2id = {"injection": 0, "benign": 1}
    encoded = encode(LabelledTexts(("w0", "w1"), ("benign", "injection")), tokenizer, config=config, max_length=8)
    plain = encode(LabelledTexts(("w0",), ()), tokenizer, config=config, max_length=8)

    assert encoded.label_ids == (1, 0)
    assert plain.label_ids == (NO_LABEL,) and not plain.labelled
    with pytest.raises(InvalidDataset, match=r"'spam'.*injection, benign"):
        encode(LabelledTexts(("w0",), ("spam",)), tokenizer, config=config, max_length=8)


def test_an_empty_dataset_is_refused(bert: Path) -> None:
    with pytest.raises(InvalidDataset, match="no rows"):
        encode(LabelledTexts((), ()), load_tokenizer(bert), config=load_model(bert).config, max_length=8)


def test_padding_does_not_change_an_answer(bert: Path) -> None:
    model, rows = load_model(bert), examples(2, 9)
    with torch.inference_mode():
        together = model(**collate(rows, (0, 1)).inputs).logits[0]
        alone = model(**collate(rows, (0,)).inputs).logits[0]

    assert torch.allclose(together, alone, atol=1e-6)
