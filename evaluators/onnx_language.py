"""Decoder language models in ONNX Runtime, with the key/value cache that the exported graph has.

    model = OnnxLanguageModel.open(folder, Resources())
    logits_BTV = model.logits(ids_BT, mask_BT)
    tokens = model.greedy([1, 15, 7], max_new_tokens=24, stop=frozenset({2}))

Shapes: B rows, T tokens, P tokens before them, H key/value heads of width D, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import Tensor

from evaluators.onnx_files import MODEL_FILE, read_onnx
from evaluators.parity import compare_logits, read_reference
from evaluators.runtimes import RUNTIME_ERRORS, Resources, open_session
from modelpress.errors import InvalidModel
from modelpress.metrics import ParityReport

PAST, PRESENT = "past_key_values.", "present."
INPUTS = ("input_ids", "attention_mask", "position_ids")

Ids = NDArray[np.int64]
States = tuple[NDArray[np.float32], ...]


@dataclass(frozen=True, eq=False)
class OnnxLanguageModel:
    """A decoder open in ONNX Runtime. `past` gives the (H, D) of every key and value state, by its part of the name."""

    session: Any
    past: Mapping[str, tuple[int, int]]
    runtime: str
    """Library, version and the provider that really runs; what is not quantized computes in float32."""

    @classmethod
    def open(cls, folder: Path, resources: Resources) -> OnnxLanguageModel:
        """Open `model.onnx` with exactly the provider and threads asked for; any fallback is an error.

        Raises InvalidModel for a file that is no decoder with a key/value cache, FailedPrecondition where the device
        is not usable.
        """
        read_onnx(folder)
        session = open_session(folder / MODEL_FILE, resources)
        return cls(
            session=session,
            past=_past(session),
            runtime=f"onnxruntime {onnxruntime.__version__} {session.get_providers()[0]} float32",
        )

    def logits(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Logits [B, T, V] in float32; padding, where `mask_BT` is 0, may be on either side."""
        ids, mask = _integers(ids_BT), _integers(mask_BT)
        (logits_BTV,) = self._run(("logits",), ids, mask=mask, before=self._nothing(len(ids)))
        return torch.from_numpy(logits_BTV)

    def logits_after(self, ids_BT: Tensor, mask_BT: Tensor, *, at: int) -> Tensor:
        """The same logits, computed in two runs: `at` tokens fill the cache, the others read it."""
        ids, mask = _integers(ids_BT), _integers(mask_BT)
        first, *states = self._run(self._outputs, ids[:, :at], mask=mask[:, :at], before=self._nothing(len(ids)))
        (second,) = self._run(("logits",), ids[:, at:], mask=mask, before=tuple(states))
        return torch.from_numpy(np.concatenate((first, second), axis=1))

    def greedy(self, ids_T: list[int], *, max_new_tokens: int, stop: frozenset[int]) -> list[int]:
        """The most likely token, again and again, each run reading one token and the cache; only the new tokens."""
        step, states, new = np.array([ids_T], dtype=np.int64), self._nothing(1), list[int]()
        while len(new) < max_new_tokens and not (new and new[-1] in stop):
            mask = np.ones((1, len(ids_T) + len(new)), dtype=np.int64)
            logits_BTV, *present = self._run(self._outputs, step, mask=mask, before=states)
            new.append(int(logits_BTV[0, -1].argmax()))
            step, states = np.array([[new[-1]]], dtype=np.int64), tuple(present)
        return new

    @property
    def _outputs(self) -> tuple[str, ...]:
        return ("logits", *(PRESENT + part for part in self.past))

    def _nothing(self, rows: int) -> States:
        """The states [B, H, 0, D] before the first token."""
        return tuple(np.zeros((rows, heads, 0, width), dtype=np.float32) for heads, width in self.past.values())

    def _run(self, outputs: tuple[str, ...], ids_BT: Ids, *, mask: Ids, before: States) -> list[Any]:
        """One run over tokens whose cache is `before`; `mask` [B, P + T] tells of those too."""
        rows, tokens = ids_BT.shape
        positions_BT = np.maximum(mask.cumsum(axis=1) - 1, 0)[:, mask.shape[1] - tokens :]
        states = dict(zip((PAST + part for part in self.past), before, strict=True))
        feeds = dict(zip(INPUTS, (ids_BT, mask, positions_BT), strict=True)) | states
        try:
            return list(self.session.run(list(outputs), feeds))
        except RUNTIME_ERRORS as error:
            raise InvalidModel(
                f"the exported model fails on {rows} x {tokens} tokens after {mask.shape[1] - tokens}: export it with "
                "free batch, sequence and past dimensions"
            ) from error


def measure_language_parity(model: Path, *, reference: Path, resources: Resources) -> ParityReport:
    """The exported `model` against the logits in torch that the export wrote to the folder `reference`.

    Every token that is no padding counts twice: read at once, and in two halves, the second of which reads the cache.
    A label change is a position with another most likely token. InvalidModel where a logit is not finite.
    """
    tensors = read_reference(reference)
    opened = OnnxLanguageModel.open(model, resources)
    ids_BT, mask_BT = torch.from_numpy(tensors["input_ids"]), torch.from_numpy(tensors["attention_mask"])
    found = (opened.logits(ids_BT, mask_BT), opened.logits_after(ids_BT, mask_BT, at=ids_BT.shape[1] // 2))
    counted_BT = tensors["attention_mask"] != 0
    expected_NV = tensors["logits"][counted_BT]
    return compare_logits(
        np.concatenate([expected_NV] * len(found)),
        np.concatenate([logits_BTV.numpy()[counted_BT] for logits_BTV in found]),
    )


def _past(session: Any) -> dict[str, tuple[int, int]]:
    """What the graph's cache looks like; InvalidModel where its inputs and outputs are not those of a decoder."""
    shapes = {value.name: value.shape for value in session.get_inputs()}
    past = {name.removeprefix(PAST): shape for name, shape in shapes.items() if name.startswith(PAST)}
    expected = {*INPUTS, *(PAST + part for part in past)}
    outputs = {value.name for value in session.get_outputs()}
    if not past or shapes.keys() != expected or not outputs >= {"logits", *(PRESENT + part for part in past)}:
        raise InvalidModel(
            f"the exported model takes {', '.join(shapes)[:200]}: a decoder takes {', '.join(INPUTS)} and {PAST}*, and "
            f"gives logits and {PRESENT}*"
        )
    fixed = {part: (shape[1], shape[3]) for part, shape in past.items() if len(shape) == 4}
    if len(fixed) != len(past) or not all(isinstance(size, int) for sizes in fixed.values() for size in sizes):
        raise InvalidModel("the exported model's cache has no fixed number and width of heads: export it again")
    return fixed


def _integers(values: Tensor) -> Ids:
    return np.asarray(values.cpu().numpy(), dtype=np.int64)
