"""Every row is answered once, in its place, by the file that ships; figures follow from counts done by hand."""

from __future__ import annotations

import numpy as np
import pytest

from evaluators.predictions import Predictions
from evaluators.runtimes import Resources
from evaluators.text_classification import compare, measure_quality, predict, predict_probes
from modelpress.errors import InvalidDataset, InvalidModel, InvalidRequest
from modelpress.evaluations import Evaluation
from modelpress.metrics import PairedCounts

TEXTS = ["w1 w2 w3", "w4", "", "w5 w6 w7 w8 w9 w10 w11", "w12 unknown", "w13 w14", "w15", "w16 w17 w18 w19 w20"]


def _evaluation(**changes) -> Evaluation:
    return Evaluation.model_validate({"max_length": 24, **changes})


def _run(run, model, data, **changes) -> Predictions:
    return run(model, data=data, evaluation=_evaluation(**changes), resources=Resources(), progress=lambda *_: None)


def _made(answers, truth, labels=("no", "yes")) -> Predictions:
    """Predictions whose largest logit is at `answers`."""
    logits = np.eye(len(labels), dtype=np.float32)[list(answers)]
    return Predictions(labels, logits, np.array(truth, dtype=np.int64), 0, "onnxruntime")


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_any_batch_size_and_padding_gives_the_same_logits_in_file_order(
    tmp_path, table, write_model, write_rows, mean_logits, batch_size
):
    data = write_rows(tmp_path / "d", [{"text": text} for text in TEXTS])
    found = _run(predict_probes, write_model(tmp_path / "m", table), data, batch_size=batch_size)
    np.testing.assert_allclose(found.logits, [mean_logits(table, text) for text in TEXTS], rtol=1e-5, atol=1e-6)
    assert found.truth is None


def test_progress_ends_at_every_row(tmp_path, table, write_model, write_rows):
    data = write_rows(tmp_path / "d", [{"text": text} for text in TEXTS])
    seen = []
    predict_probes(
        write_model(tmp_path / "m", table),
        data=data,
        evaluation=_evaluation(batch_size=3),
        resources=Resources(),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(3, 8), (6, 8), (8, 8)]


def test_texts_over_the_maximum_length_are_cut_and_counted(tmp_path, table, write_model, write_rows, mean_logits):
    texts = ["w1 w2 w3 w4", "w1 w2 w3 w4 w5", "w9 " * 100]
    rows = [{"text": text, "label": "no"} for text in texts]
    found = _run(predict, write_model(tmp_path / "m", table), write_rows(tmp_path / "d", rows), max_length=6)
    np.testing.assert_allclose(found.logits, [mean_logits(table, text, 6) for text in texts], rtol=1e-5, atol=1e-6)
    assert found.truncated == 2
    quality = measure_quality(found, dataset="sha256:d", confidence=0.95)
    assert "2 of 3 texts were truncated at the maximum length" in quality.warnings


def test_a_maximum_length_beyond_the_model_is_refused(tmp_path, table, write_model, write_rows):
    data = write_rows(tmp_path / "d", [{"text": "w1"}])
    with pytest.raises(InvalidRequest, match="at most 24 tokens") as caught:
        _run(predict_probes, write_model(tmp_path / "m", table), data, max_length=25)
    assert caught.value.field == "evaluation.max_length"


@pytest.mark.parametrize("labels", [("no", "yes"), ("yes", "no")])
def test_labels_are_matched_by_name_whatever_the_order_of_ids(
    tmp_path, table, write_model, write_rows, mean_logits, labels
):
    dataset_names = ["yes", "no"]
    model = write_model(tmp_path / "m", table, labels=labels)
    names = [labels[int(mean_logits(table, text).argmax())] for text in TEXTS]
    by_name = [{"text": text, "label": name} for text, name in zip(TEXTS, names, strict=True)]
    by_id = [{"text": row["text"], "label": dataset_names.index(row["label"])} for row in by_name]
    for rows, label_names in ((by_name, []), (by_id, dataset_names)):
        found = _run(predict, model, write_rows(tmp_path / "d", rows), label_names=label_names)
        assert measure_quality(found, dataset="sha256:d", confidence=0.95).accuracy.value == 1.0


def test_a_label_that_differs_in_case_is_matched_and_said_so(tmp_path, table, write_model, write_rows):
    data = write_rows(tmp_path / "d", [{"text": "w1", "label": "NO"}])
    found = _run(predict, write_model(tmp_path / "m", table), data)
    assert found.truth.tolist() == [0]
    assert "'NO'" in measure_quality(found, dataset="sha256:d", confidence=0.95).warnings[0]


def test_a_label_that_the_model_does_not_know_is_refused(tmp_path, table, write_model, write_rows):
    data = write_rows(tmp_path / "d", [{"text": "w1", "label": "maybe"}])
    with pytest.raises(InvalidDataset, match="line 1: label 'maybe' is unknown to the model, which knows no, yes"):
        _run(predict, write_model(tmp_path / "m", table), data)


def test_a_classifier_of_another_width_than_its_labels_is_refused(tmp_path, table, write_model, write_rows):
    data = write_rows(tmp_path / "d", [{"text": "w1"}])
    with pytest.raises(InvalidModel, match="id2label"):
        _run(predict_probes, write_model(tmp_path / "m", table, labels=("a", "b", "c")), data)


def test_a_model_that_answers_nan_is_refused(tmp_path, table, write_model, write_rows):
    table[9] = np.nan
    data = write_rows(tmp_path / "d", [{"text": "w1"}, {"text": "w5"}])
    with pytest.raises(InvalidModel, match="first row 1"):
        _run(predict_probes, write_model(tmp_path / "m", table), data)


def test_quality_is_what_the_counts_give_by_hand():
    # confusion, rows true: a: 3 a, 1 b, 0 c; b: 0 a, 2 b, 0 c; c: 1 a, 1 b, 2 c
    truth, answers = [0, 0, 0, 0, 1, 1, 2, 2, 2, 2], [0, 0, 0, 1, 1, 1, 0, 1, 2, 2]
    quality = measure_quality(_made(answers, truth, ("a", "b", "c")), dataset="sha256:d", confidence=0.9)
    assert quality.confusion == ((3, 1, 0), (0, 2, 0), (1, 1, 2))
    assert (quality.accuracy.value, quality.accuracy.n, quality.accuracy.interval.confidence) == (0.7, 10, 0.9)
    found = {q.label: (q.precision, q.recall, q.f1, q.support) for q in quality.per_class}
    assert found == {"a": (3 / 4, 3 / 4, 6 / 8, 4), "b": (2 / 4, 1.0, 4 / 6, 2), "c": (1.0, 2 / 4, 4 / 6, 4)}
    assert quality.f1_macro.value == pytest.approx((6 / 8 + 4 / 6 + 4 / 6) / 3)
    assert quality.warnings == ()


def test_one_class_gives_none_and_a_warning_instead_of_a_number():
    quality = measure_quality(_made([0, 0, 0], [0, 0, 0]), dataset="sha256:d", confidence=0.95)
    other = quality.per_class[1]
    assert (other.precision, other.recall, other.f1, other.support) == (None, None, None, 0)
    assert (quality.accuracy.value, quality.f1_macro.value) == (1.0, 1.0)
    assert quality.warnings == (
        "the dataset holds one class only ('no'): accuracy says little",
        "no example of 'yes': recall is not defined there",
    )
    assert "NaN" not in quality.model_dump_json()


def test_a_class_without_examples_that_is_answered_counts_in_macro_f1():
    quality = measure_quality(_made([0, 1], [0, 0]), dataset="sha256:d", confidence=0.95)
    assert quality.f1_macro.value == pytest.approx((2 / 3 + 0) / 2)


def test_paired_counts_follow_names_where_the_candidate_orders_labels_otherwise():
    truth = [0, 0, 1, 1, 1]
    baseline = _made([0, 1, 1, 0, 1], truth)
    candidate = _made([0, 0, 1, 0, 0], truth).in_order(("yes", "no"))
    assert candidate.labels == ("yes", "no")
    assert compare(baseline, candidate) == PairedCounts(
        both_right=2, only_baseline_right=1, only_candidate_right=1, both_wrong=1
    )


def test_predictions_of_other_rows_are_not_comparable():
    with pytest.raises(InvalidRequest, match="same rows"):
        compare(_made([0, 1], [0, 1]), _made([0, 1], [1, 1]))


def test_quality_without_labels_is_refused():
    unlabelled = Predictions(("no", "yes"), np.zeros((1, 2), dtype=np.float32), None, 0, "onnxruntime")
    with pytest.raises(InvalidRequest, match="needs labels"):
        measure_quality(unlabelled, dataset="sha256:d", confidence=0.95)
