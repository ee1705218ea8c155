"""Two whole models' logits on the same seeded token ids, in FP32, one model in memory at a time.

Shapes: T tokens of a row, K logits of a position.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor

from evaluators.architectures import model_class, model_config, vocabulary
from evaluators.peft_adapters import Adapter, combine, quiet
from evaluators.stored_weights import NotComparable, StoredWeights
from modelpress.errors import InvalidModel
from modelpress.merge_recipes import MergeLora
from modelpress.merge_reports import LogitComparison

ROW_LENGTHS = (16, 11, 7, 4, 2)
"""Rows are run one by one: no padding, and no model that refuses it."""
OVERHEAD = 1.1
LIBRARIES_BYTES = 600_000_000


def check_memory(weights: StoredWeights, *, limit_bytes: int) -> None:
    """NotComparable where the model does not fit in FP32 beside its mapped files and the libraries.

    A Llama of 1.1 billion parameters stored in bfloat16 took 7.0 GB, all of its files' pages included; this says 7.6.
    """
    needed = int(4 * weights.parameters * OVERHEAD) + weights.stored_bytes + LIBRARIES_BYTES
    if needed > limit_bytes:
        raise NotComparable(
            f"{weights.parameters} parameters take about {needed} bytes in FP32, the memory limit is {limit_bytes}"
        )


def token_rows(model: Any, *, seed: int) -> list[Tensor]:
    """Seeded ids [1, T] of several lengths; NotComparable for a model that does not start from token ids."""
    size = vocabulary(model)
    if size is None or model.main_input_name != "input_ids":
        raise NotComparable(f"{type(model).__name__} takes {model.main_input_name}, no token ids")
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or max(ROW_LENGTHS)
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(size, (1, min(length, longest)), generator=generator) for length in ROW_LENGTHS]


def load(folder: Path, *, config: Mapping[str, Any], device: str) -> Any:
    """The model in the folder as the class that `config` names, in FP32 and eval mode."""
    with quiet():
        model = model_class(config).from_pretrained(
            folder,
            config=model_config(config),
            local_files_only=True,
            use_safetensors=True,
            dtype=torch.float32,
            attn_implementation="eager",
        )
    return model.eval().to(device)


def combine_all(attached: Any, adapters: Sequence[Adapter], arguments: MergeLora) -> None:
    """Let every layer of a PeftModel run the weighted combination; NotComparable where PEFT has none."""
    weights = {adapter.label: adapter.weight for adapter in adapters}
    for module in attached.modules():
        if isinstance(module, ModulesToSaveWrapper):
            labels = list(module.modules_to_save)
            if len(labels) > 1 or weights[labels[0]] != 1:
                raise NotComparable("PEFT has no weighted sum of trained modules")
            module.set_adapter(labels)
        elif isinstance(module, BaseTunerLayer):
            combine(module, adapters, tuner=attached.base_model, arguments=arguments)
    biased = [adapter for adapter in adapters if getattr(adapter.config, "bias", "none") != "none"]
    if biased and (len(adapters) > 1 or biased[0].weight != 1):
        raise NotComparable("PEFT has no weighted sum of trained biases")


def compare_logits(reference: Callable[[], Any], merged: Callable[[], Any], rows: Sequence[Tensor]) -> LogitComparison:
    """Run both models, each made when its turn comes and freed after it."""
    expected = _logits(reference(), rows)
    gc.collect()  # modules refer to one another: without it the first model would stay
    found = _logits(merged(), rows)
    if any(y.shape != y_found.shape for y, y_found in zip(expected, found, strict=True)):
        raise InvalidModel("the merged model's logits have another shape than those of base and adapter")
    y_NK, found_NK = torch.cat(expected), torch.cat(found)
    if not (torch.isfinite(y_NK).all() and torch.isfinite(found_NK).all()):
        raise InvalidModel("the model answers random token ids with NaN or infinity", reason="NON_FINITE_LOGITS")
    return LogitComparison(
        max_difference=float((y_NK - found_NK).abs().max()),
        max_logit=float(y_NK.abs().max()),
        label_changes=int((y_NK.argmax(dim=-1) != found_NK.argmax(dim=-1)).sum()),
        n=len(y_NK),
    )


def _logits(model: Any, rows: Sequence[Tensor]) -> list[Tensor]:
    """[positions, K] of each row, on the CPU."""
    return [_run(model, row.to(model.device)) for row in rows]


@torch.no_grad()
def _run(model: Any, ids_1T: Tensor) -> Tensor:
    decoder = {"decoder_input_ids": ids_1T} if getattr(model.config, "is_encoder_decoder", False) else {}
    output = model(input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T), **decoder)
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise NotComparable(f"{type(model).__name__} has no logits")
    return logits.flatten(0, -2).cpu()
