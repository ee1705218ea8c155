"""Predictions are valid once built, keep every bit, and follow label names rather than label ids."""

from __future__ import annotations

import numpy as np
import pytest

from evaluators.predictions import Predictions, load_predictions
from modelpress.errors import DataLoss, InvalidModel, InvalidRequest


def _predictions(logits, truth=None, labels=("no", "yes")) -> Predictions:
    ids = None if truth is None else np.array(truth, dtype=np.int64)
    return Predictions(labels, np.array(logits, dtype=np.float32), ids, 1, "onnxruntime", ("a warning",))


@pytest.mark.parametrize("truth", [None, [0, 1]])
def test_saving_and_loading_keeps_every_bit(tmp_path, truth):
    before = _predictions([[0.1, -3e-38], [1e38, 2]], truth)
    before.save(tmp_path)
    after = load_predictions(tmp_path)
    assert after.logits.tobytes() == before.logits.tobytes()
    assert (after.truth is None) if truth is None else (after.truth.tolist() == truth)
    facts = ("labels", "truncated", "runtime", "warnings")
    assert [getattr(after, name) for name in facts] == [getattr(before, name) for name in facts]


def test_equal_predictions_are_equal_bytes(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        _predictions([[1, 2]], [0]).save(tmp_path / name)
    files = [sorted((f.name, f.read_bytes()) for f in (tmp_path / name).iterdir()) for name in ("a", "b")]
    assert files[0] == files[1]


def test_a_stored_set_that_is_cut_short_is_data_loss(tmp_path):
    _predictions([[1, 2]], [0]).save(tmp_path)
    file = tmp_path / "predictions.safetensors"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(DataLoss):
        load_predictions(tmp_path)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_answer_that_is_no_number_is_refused_with_its_row(bad):
    with pytest.raises(InvalidModel, match="1 of 2 rows with NaN or infinity, first row 1"):
        _predictions([[0, 1], [bad, 1]])


@pytest.mark.parametrize("logits", [[[1, 2, 3]], [1, 2], np.zeros((0, 2))])
def test_logits_that_do_not_fit_the_labels_are_refused(logits):
    with pytest.raises(InvalidModel, match="2 labels"):
        _predictions(logits)


@pytest.mark.parametrize("truth", [[0], [0, 2], [-1, 0]])
def test_true_ids_that_do_not_fit_are_refused(truth):
    with pytest.raises(InvalidRequest, match="true labels"):
        _predictions([[0, 1], [1, 0]], truth)


def test_another_label_order_is_the_same_predictions():
    one = _predictions([[1, 2, 3], [6, 5, 4]], [0, 2], labels=("a", "b", "c"))
    other = one.in_order(("c", "a", "b"))
    assert other.logits.tolist() == [[3, 1, 2], [4, 6, 5]]
    assert [other.labels[i] for i in other.truth] == ["a", "c"]
    assert [other.labels[i] for i in other.answers] == [one.labels[i] for i in one.answers]


@pytest.mark.parametrize("labels", [("a", "b"), ("a", "b", "d"), ("a", "b", "b")])
def test_other_labels_are_not_comparable(labels):
    with pytest.raises(InvalidModel, match="same labels"):
        _predictions([[1, 2, 3]], labels=("a", "b", "c")).in_order(labels)
