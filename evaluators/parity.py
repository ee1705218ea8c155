"""Parity: the compressed model in torch against its own export in the runtime, on the same inputs.

The export writes the reference: `parity.safetensors` with `input_ids` and `attention_mask` [N, T], `token_type_ids`
where the model has them, and the torch model's `logits` [N, K]. Padded rows are among them, so that a lost attention
mask shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from evaluators.runtimes import Resources, open_onnx
from modelpress.errors import DataLoss, InvalidModel
from modelpress.metrics import ParityReport

VERSION = 1
REFERENCE_FILE = "parity.safetensors"
BATCH_ROWS = 32


def measure_parity(model: Path, *, reference: Path, resources: Resources) -> ParityReport:
    """Run the reference's inputs through the exported `model`; `reference` is the folder with its file.

    Raises InvalidModel where either side is not finite: such logits differ by no number.
    """
    tensors = read_reference(reference)
    opened = open_onnx(model, resources)
    expected_NK, ids_NT = tensors["logits"], tensors["input_ids"]
    inputs = {
        "input_ids": ids_NT,
        "attention_mask": tensors["attention_mask"],
        "token_type_ids": tensors.get("token_type_ids", np.zeros_like(ids_NT)),
    }
    found_NK = np.concatenate(
        [
            opened.logits({name: value[start : start + BATCH_ROWS] for name, value in inputs.items()})
            for start in range(0, len(ids_NT), BATCH_ROWS)
        ]
    )
    return compare_logits(expected_NK, found_NK)


def compare_logits(expected_NK: NDArray[np.float32], found_NK: NDArray[np.float32]) -> ParityReport:
    """Largest and mean absolute difference of the logits, and rows whose largest logit is another one."""
    if expected_NK.shape != found_NK.shape:
        raise InvalidModel(f"the export gives logits of shape {found_NK.shape}, the torch model {expected_NK.shape}")
    if not (np.isfinite(expected_NK).all() and np.isfinite(found_NK).all()):
        raise InvalidModel("the model answers the parity inputs with NaN or infinity", reason="NON_FINITE_LOGITS")
    difference_NK = np.abs(expected_NK.astype(np.float64) - found_NK)
    return ParityReport(
        max_logit_difference=float(difference_NK.max()),
        mean_logit_difference=float(difference_NK.mean()),
        label_changes=int((expected_NK.argmax(axis=1) != found_NK.argmax(axis=1)).sum()),
        n=len(expected_NK),
    )


def read_reference(reference: Path) -> dict[str, NDArray[Any]]:
    """The tensors that the export wrote; DataLoss where one is missing or there are no rows."""
    try:
        tensors: dict[str, NDArray[Any]] = load_file(reference / REFERENCE_FILE)
    except (OSError, SafetensorError) as error:
        raise DataLoss(f"{REFERENCE_FILE} of the export cannot be read: export again") from error
    missing = {"input_ids", "attention_mask", "logits"} - tensors.keys()
    if missing or not len(tensors["input_ids"]):
        raise DataLoss(f"{REFERENCE_FILE} of the export has no rows or lacks {', '.join(sorted(missing)) or 'nothing'}")
    return tensors
