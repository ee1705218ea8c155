"""The evaluation's tasks and what measures them. A new task is one file and one row here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from evaluators import text_classification
from evaluators.predictions import Predictions
from evaluators.runtimes import Resources
from modelpress.evaluations import Evaluation
from modelpress.metrics import PairedCounts
from modelpress.reports import QualityReport


class Predict(Protocol):
    """Run the exported model in folder `model` over the dataset in folder `data`."""

    def __call__(
        self,
        model: Path,
        *,
        data: Path,
        evaluation: Evaluation,
        resources: Resources,
        progress: text_classification.Progress,
    ) -> Predictions: ...


class MeasureQuality(Protocol):
    def __call__(self, predictions: Predictions, *, dataset: str, confidence: float) -> QualityReport: ...


class Compare(Protocol):
    def __call__(self, baseline: Predictions, candidate: Predictions) -> PairedCounts: ...


class Task(NamedTuple):
    """`version` is raised whenever predictions or figures of the task may change."""

    predict: Predict
    predict_probes: Predict
    measure_quality: MeasureQuality
    compare: Compare
    version: int


TASKS: Mapping[str, Task] = {
    "text-classification": Task(
        predict=text_classification.predict,
        predict_probes=text_classification.predict_probes,
        measure_quality=text_classification.measure_quality,
        compare=text_classification.compare,
        version=text_classification.VERSION,
    )
}
