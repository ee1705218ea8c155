"""A language model as safetensors, open in transformers in float32.

A quantized folder is read by its layout's own reader and its values are put into the plain model: what is computed is
what the format means, on every device, and no library repacks or casts what it finds. Shapes: B rows, T tokens,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import compressed_tensors
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from evaluators.architectures import model_class, model_config
from evaluators.compressed_weights import CompressedWeights, quantize_activations
from evaluators.local_weights import LocalWeights
from evaluators.quantized_reading import plain, quantization_method
from evaluators.runtimes import Resources
from evaluators.stored_weights import NotComparable
from modelpress.errors import FailedPrecondition, InvalidModel

ATTENTION = "sdpa"
READ_BY: Mapping[str | None, str] = {
    None: "",
    "compressed-tensors": f", weights unpacked by compressed-tensors {compressed_tensors.__version__}",
    "gptq": ", weights dequantized from gptq",
    "bitsandbytes": ", weights dequantized from bitsandbytes",
}
"""quant_method -> what the runtime's name says of it."""


@dataclass(frozen=True, eq=False)
class TransformersLanguageModel:
    """A LanguageModel in torch. Its weights are copies in memory: the folder's files are only read."""

    model: Any
    device: str
    runtime: str

    @torch.inference_mode()
    def logits(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Logits [B, T, V] in float32. A token's position counts the tokens before it, not the padding."""
        positions_BT = (mask_BT.cumsum(dim=1) - 1).clamp(min=0)
        inputs = {"input_ids": ids_BT, "attention_mask": mask_BT, "position_ids": positions_BT}
        placed = {name: value.to(self.device) for name, value in inputs.items()}
        return self._run(use_cache=False, **placed).logits.float()  # type: ignore[no-any-return]

    @torch.inference_mode()
    def greedy(self, ids_T: list[int], *, max_new_tokens: int, stop: frozenset[int]) -> list[int]:
        new: list[int] = []
        cache = DynamicCache(config=self.model.config)
        while len(new) < max_new_tokens and not stop.intersection(new[-1:]):
            ids_1T = torch.tensor([new[-1:] or ids_T], device=self.device)
            logits_1TV = self._run(input_ids=ids_1T, cache=cache, use_cache=True).logits
            new.append(int(logits_1TV[0, -1].argmax()))
        return new

    def _run(self, **inputs: Any) -> Any:
        try:
            return self.model(**inputs)
        except (RuntimeError, IndexError, TypeError) as error:
            raise InvalidModel(
                f"the model fails on {' x '.join(map(str, inputs['input_ids'].shape))} tokens: its config.json and its "
                "weights disagree"
            ) from error


def open_transformers(folder: Path, resources: Resources) -> TransformersLanguageModel:
    """Open with exactly the device asked for; torch's threads become those of `resources`. The folder is only read.

    Raises InvalidModel where a tensor is missing, of another shape, or one that the config has no place for.
    """
    if resources.device == "cuda" and not torch.cuda.is_available():
        raise FailedPrecondition("device 'cuda' is not usable: torch finds no CUDA device here", field="device")
    torch.set_num_threads(resources.threads)
    stored = LocalWeights.open(folder)
    weights = plain(stored)
    state = {name: weights.load(name) for name in weights.tensors}
    model = _build(stored.config, state)
    if isinstance(weights, CompressedWeights):
        quantize_activations(model, weights)
    read_by = READ_BY[quantization_method(stored)]
    runtime = f"transformers {transformers.__version__} {resources.device} float32{read_by}"
    return TransformersLanguageModel(model.to(resources.device).eval(), resources.device, runtime)


def _build(config: Mapping[str, Any], state: dict[str, Tensor]) -> Any:
    """The plain model with the values of `state`; every one used, none missing."""
    try:
        architecture, settings = model_class(config), model_config(config)
    except NotComparable as reason:
        raise InvalidModel(f"the model cannot be opened: {reason}", field="config.json") from None
    if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config["model_type"]) != architecture.__name__:
        raise InvalidModel(
            f"config.json: architecture {architecture.__name__!r} is no decoder language model", field="architectures"
        )
    try:
        model, found = architecture.from_pretrained(
            None,
            config=settings,
            state_dict=state,
            dtype=torch.float32,
            attn_implementation=ATTENTION,
            output_loading_info=True,
        )
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidModel("the model's tensors do not have the shapes that its config.json gives") from error
    _check_complete(missing=found["missing_keys"], unexpected=found["unexpected_keys"])
    return model


def _check_complete(*, missing: set[str], unexpected: set[str]) -> None:
    if missing:
        raise InvalidModel(
            f"{len(missing)} tensors of the model are not in its files, first {min(missing)!r}: save the whole model",
            field=min(missing),
        )
    if unexpected:
        raise InvalidModel(
            f"{len(unexpected)} tensors in the model's files have no place in it, first {min(unexpected)!r}: its "
            "config.json is another model's",
            field=min(unexpected),
        )
