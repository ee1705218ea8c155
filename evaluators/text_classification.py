"""Text classification: run an exported model over a dataset, and measure its quality from the stored logits.

Shapes: N rows, K labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evaluators.predictions import Predictions
from evaluators.runtimes import OnnxModel, Resources, open_onnx
from evaluators.tokenization import check_ids, check_max_length, encode, load_tokenizer, padded_batches
from modelpress.datasets import LabelledTexts, read_labelled_texts, read_texts
from modelpress.errors import InvalidRequest
from modelpress.evaluations import Evaluation
from modelpress.intervals import share_interval
from modelpress.metrics import Metric, PairedCounts
from modelpress.reports import ClassQuality, QualityReport

VERSION = 2
"""Raised whenever predictions or figures may change: part of their cache keys."""

Progress = Callable[[int, int], None]
"""Called with rows done and rows in all."""


def predict(
    model: Path, *, data: Path, evaluation: Evaluation, resources: Resources, progress: Progress
) -> Predictions:
    """Logits of every row of a labelled dataset. Labels are matched by name: InvalidDataset for an unknown one."""
    opened = open_onnx(model, resources)
    rows = read_labelled_texts(
        data,
        text_column=evaluation.text_column,
        label_column=evaluation.label_column,
        known_labels=opened.labels,
        label_names=evaluation.label_names,
    )
    return _predict(opened, rows, model=model, evaluation=evaluation, progress=progress)


def predict_probes(
    model: Path, *, data: Path, evaluation: Evaluation, resources: Resources, progress: Progress
) -> Predictions:
    """The same for texts whose labels, if they have any, are not looked at."""
    opened = open_onnx(model, resources)
    rows = read_texts(data, text_column=evaluation.text_column)
    return _predict(opened, rows, model=model, evaluation=evaluation, progress=progress)


def _predict(
    opened: OnnxModel, rows: LabelledTexts, *, model: Path, evaluation: Evaluation, progress: Progress
) -> Predictions:
    tokenizer = load_tokenizer(model)
    check_max_length(evaluation.max_length, config=opened.config, tokenizer=tokenizer)
    encoded = encode(rows.texts, tokenizer=tokenizer, max_length=evaluation.max_length)
    check_ids(encoded, vocabulary=opened.config.get("vocab_size"))
    logits_NK = np.full((len(rows), len(opened.labels)), np.nan, dtype=np.float32)
    done = 0
    for indices, feeds in padded_batches(encoded, batch_size=evaluation.batch_size):
        logits_NK[indices] = opened.logits(feeds)
        done += len(indices)
        progress(done, len(rows))
    ids = {label: i for i, label in enumerate(opened.labels)}
    truth_N = np.array([ids[label] for label in rows.labels], dtype=np.int64) if rows.labels else None
    return Predictions(opened.labels, logits_NK, truth_N, encoded.truncated, opened.runtime, rows.warnings)


def measure_quality(predictions: Predictions, *, dataset: str, confidence: float) -> QualityReport:
    """Accuracy with Wilson's interval, F1 and the confusion matrix; `dataset` is the digest of what was predicted.

    A figure that would divide by zero is None. Macro F1 is the mean over the labels that occur, as truth or as answer.
    """
    confusion_KK = confusion_matrix(_truth(predictions), predictions.answers, labels=len(predictions.labels))
    n, right = len(predictions), int(np.trace(confusion_KK))
    per_class = class_qualities(confusion_KK, predictions.labels)
    defined = [quality.f1 for quality in per_class if quality.f1 is not None]
    return QualityReport(
        runtime=predictions.runtime,
        dataset=dataset,
        accuracy=Metric(
            name="accuracy",
            value=right / n,
            unit="fraction",
            n=n,
            interval=share_interval(right, n, confidence=confidence),
        ),
        f1_macro=Metric(name="f1_macro", value=sum(defined) / len(defined), unit="fraction", n=n),
        per_class=per_class,
        labels=predictions.labels,
        confusion=tuple(tuple(map(int, row)) for row in confusion_KK),
        truncated=predictions.truncated,
        warnings=(*predictions.warnings, *_warnings(predictions, per_class)),
    )


def compare(baseline: Predictions, candidate: Predictions) -> PairedCounts:
    """Who is right where, over the same rows; the candidate's labels are matched to the baseline's by name."""
    candidate = candidate.in_order(baseline.labels)
    truth_N = _truth(baseline)
    if not np.array_equal(truth_N, _truth(candidate)):
        raise InvalidRequest("baseline and candidate were not predicted on the same rows: predict both on one dataset")
    baseline_right_N, candidate_right_N = baseline.answers == truth_N, candidate.answers == truth_N
    return PairedCounts(
        both_right=int((baseline_right_N & candidate_right_N).sum()),
        only_baseline_right=int((baseline_right_N & ~candidate_right_N).sum()),
        only_candidate_right=int((~baseline_right_N & candidate_right_N).sum()),
        both_wrong=int((~baseline_right_N & ~candidate_right_N).sum()),
    )


def confusion_matrix(truth_N: NDArray[np.int64], answers_N: NDArray[np.int64], *, labels: int) -> NDArray[np.int64]:
    """Counts [K, K]: rows are true labels, columns answers."""
    return np.bincount(truth_N * labels + answers_N, minlength=labels * labels).reshape(labels, labels)


def class_qualities(confusion_KK: NDArray[np.int64], labels: Sequence[str]) -> tuple[ClassQuality, ...]:
    """Precision, recall and F1 of each label; None where nothing was answered, or nothing true, or neither."""
    hits_K, answered_K, true_K = np.diag(confusion_KK), confusion_KK.sum(axis=0), confusion_KK.sum(axis=1)
    return tuple(
        ClassQuality(
            label=label,
            precision=_ratio(hits, answered),
            recall=_ratio(hits, true),
            f1=_ratio(2 * hits, answered + true),
            support=true,
        )
        for label, hits, answered, true in zip(
            labels, hits_K.tolist(), answered_K.tolist(), true_K.tolist(), strict=True
        )
    )


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _truth(predictions: Predictions) -> NDArray[np.int64]:
    if predictions.truth is None:
        raise InvalidRequest("quality needs labels: these predictions were made without")
    return predictions.truth


def _warnings(predictions: Predictions, per_class: Sequence[ClassQuality]) -> list[str]:
    present = [quality.label for quality in per_class if quality.support]
    absent = [quality.label for quality in per_class if not quality.support]
    warnings = []
    if predictions.truncated:
        warnings.append(f"{predictions.truncated} of {len(predictions)} texts were truncated at the maximum length")
    if len(present) == 1:
        warnings.append(f"the dataset holds one class only ({present[0]!r}): accuracy says little")
    if absent:
        warnings.append(f"no example of {', '.join(map(repr, absent))}: recall is not defined there")
    return warnings
