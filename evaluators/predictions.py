"""Predictions: the logits of one stored model on every row of one dataset, kept so that nothing is measured twice.

Shapes: N rows, K labels.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from modelpress.canonical import canonical_json
from modelpress.errors import DataLoss, InvalidModel, InvalidRequest

TENSORS_FILE = "predictions.safetensors"
FACTS_FILE = "predictions.json"


@dataclass(frozen=True, eq=False)
class Predictions:
    """Row i of `logits` [N, K] belongs to row i of the dataset; column j to `labels[j]`. Valid once built.

    `truth` [N] holds the ids, in the order of `labels`, of the dataset's own labels; None where it was read without.
    A model that answers with NaN or infinity is refused here, so that no figure can come from it.
    """

    labels: tuple[str, ...]
    logits: NDArray[np.float32]
    truth: NDArray[np.int64] | None
    truncated: int
    """Rows cut at the maximum length."""
    runtime: str
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.logits.ndim != 2 or self.logits.shape[1] != len(self.labels) or not len(self.logits):
            shape = " x ".join(map(str, self.logits.shape))
            raise InvalidModel(f"the model gives logits of shape {shape} for its {len(self.labels)} labels")
        broken = np.flatnonzero(~np.isfinite(self.logits).all(axis=1))
        if len(broken):
            raise InvalidModel(
                f"the model answers {len(broken)} of {len(self)} rows with NaN or infinity, first row {broken[0]} "
                "(from 0): look for overflow in the stage before its export",
                reason="NON_FINITE_LOGITS",
            )
        truth = self.truth
        if truth is not None and (truth.shape != (len(self),) or truth.min() < 0 or truth.max() >= len(self.labels)):
            raise InvalidRequest(
                "the true labels do not fit the predictions: one id of a known label per row is needed"
            )

    def __len__(self) -> int:
        return len(self.logits)

    @property
    def answers(self) -> NDArray[np.int64]:
        """Id of the label with the largest logit; the first of equals."""
        answers: NDArray[np.int64] = np.argmax(self.logits, axis=1)
        return answers

    def in_order(self, labels: tuple[str, ...]) -> Predictions:
        """The same predictions with columns and true ids in the order of `labels`, matched by name."""
        if set(labels) != set(self.labels) or len(labels) != len(self.labels):
            raise InvalidModel(
                f"the models do not know the same labels: {', '.join(labels)} and {', '.join(self.labels)}; "
                "baseline and candidate need equal names in `id2label`",
                field="id2label",
            )
        columns = [self.labels.index(label) for label in labels]
        new_ids = np.argsort(columns)
        truth = None if self.truth is None else new_ids[self.truth]
        return replace(self, labels=labels, logits=self.logits[:, columns], truth=truth)

    def save(self, folder: Path) -> None:
        """Write into an existing folder; equal predictions give equal bytes."""
        tensors: dict[str, NDArray[np.generic]] = {"logits": np.ascontiguousarray(self.logits)}
        if self.truth is not None:
            tensors["truth"] = np.ascontiguousarray(self.truth)
        save_file(tensors, folder / TENSORS_FILE)
        facts = {
            "labels": self.labels,
            "truncated": self.truncated,
            "runtime": self.runtime,
            "warnings": self.warnings,
        }
        (folder / FACTS_FILE).write_bytes(canonical_json(facts))


def load_predictions(folder: Path) -> Predictions:
    """Read back what `save` wrote: the same labels, the same bits. Raises DataLoss on anything else."""
    try:
        facts = json.loads((folder / FACTS_FILE).read_bytes())
        tensors = load_file(folder / TENSORS_FILE)
        return Predictions(
            labels=tuple(facts["labels"]),
            logits=tensors["logits"],
            truth=tensors.get("truth"),
            truncated=facts["truncated"],
            runtime=facts["runtime"],
            warnings=tuple(facts["warnings"]),
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise DataLoss("stored predictions cannot be read: measure them again") from error
