"""Texts become the tokens of the model's own tokenizer, or are refused."""

from __future__ import annotations

import pytest

from evaluators.tokenization import EncodedTexts, check_ids, encode, load_tokenizer, padded_batches
from modelpress.errors import InvalidDataset, InvalidModel


def test_a_folder_without_a_vocabulary_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(InvalidModel, match="no tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"version": "1.0", "model": {"type": "Nope"}}'])
def test_a_broken_tokenizer_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InvalidModel, match="cannot be loaded"):
        load_tokenizer(tmp_path)


def test_cut_texts_keep_their_last_special_token(tokenizer_folder):
    encoded = encode(["w0 w1 w2", "w0"], tokenizer=load_tokenizer(tokenizer_folder), max_length=4)
    assert encoded.input_ids == ([2, 4, 5, 3], [2, 4, 3])
    assert encoded.truncated == 1


def test_a_text_without_any_token_is_named(tokenizer_folder):
    tokenizer = load_tokenizer(tokenizer_folder)
    tokenizer.backend_tokenizer.post_processor = None
    with pytest.raises(InvalidDataset, match="row 1"):
        encode(["w0", " "], tokenizer=tokenizer, max_length=4)


def test_batches_hold_every_row_once_and_mask_what_they_pad():
    rows = ([5], [6, 7, 8], [9, 10])
    encoded = EncodedTexts(rows, tuple([1] * len(row) for row in rows), pad_id=0, truncated=0)
    batches = list(padded_batches(encoded, batch_size=2))
    assert [indices.tolist() for indices, _ in batches] == [[0, 2], [1]]
    first = {name: value.tolist() for name, value in batches[0][1].items()}
    assert first == {
        "input_ids": [[5, 0], [9, 10]],
        "attention_mask": [[1, 0], [1, 1]],
        "token_type_ids": [[1, 0], [1, 1]],
    }


def test_a_tokenizer_without_a_padding_token_pads_with_what_the_mask_leaves_out(tokenizer_folder):
    tokenizer = load_tokenizer(tokenizer_folder)
    tokenizer.pad_token = None
    encoded = encode(["w0", "w0 w1"], tokenizer=tokenizer, max_length=4)
    ((_, feeds),) = padded_batches(encoded, batch_size=2)
    assert feeds["input_ids"].tolist() == [[2, 4, 3, 0], [2, 4, 5, 3]]
    assert feeds["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_an_id_that_the_models_table_does_not_have_is_named():
    encoded = EncodedTexts(([5], [6, 7]), ([0], [0, 0]), pad_id=0, truncated=0)
    check_ids(encoded, vocabulary=8)
    with pytest.raises(InvalidModel, match="token id 7, and the model's vocabulary has 7"):
        check_ids(encoded, vocabulary=7)
