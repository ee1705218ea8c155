"""Language models, opened exactly as they ship; the runtime is chosen by what the folder holds.

    model = open_language_model(folder, Resources())
    logits_BTV = model.logits(ids_BT, mask_BT)

Shapes: B rows, T tokens, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from evaluators.onnx_files import MODEL_FILE
from evaluators.onnx_language import OnnxLanguageModel
from evaluators.runtimes import Resources
from evaluators.transformers_language import open_transformers


class LanguageModel(Protocol):
    """A decoder language model that is open in its runtime. Nothing that it does changes its folder."""

    @property
    def runtime(self) -> str:
        """Library, version, device and arithmetic, e.g. `transformers 5.24.0 cpu float32`."""

    def logits(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Logits [B, T, V] in float32 of int64 ids; `mask_BT` is 1 for tokens and 0 for padding, on either side.

        Logits at padding mean nothing; those of a row do not depend on the padding or on the other rows, up to float
        rounding. InvalidModel where the model cannot run.
        """

    def greedy(self, ids_T: list[int], *, max_new_tokens: int, stop: frozenset[int]) -> list[int]:
        """The most likely token after `ids_T`, again and again, the first of equals; only the new tokens.

        Ends after `max_new_tokens`, or with the first token of `stop`, which is the last one returned.
        """


def open_language_model(folder: Path, resources: Resources) -> LanguageModel:
    """Open `model.onnx` in ONNX Runtime, and a folder without one in transformers.

    Raises InvalidModel for a folder that is no complete decoder language model, FailedPrecondition where the device is
    not usable.
    """
    return OPENERS["onnx" if (folder / MODEL_FILE).is_file() else "safetensors"](folder, resources)


OPENERS: Mapping[str, Callable[[Path, Resources], LanguageModel]] = {
    "onnx": OnnxLanguageModel.open,
    "safetensors": open_transformers,
}
"""What the weights are stored in -> how the model is opened."""
