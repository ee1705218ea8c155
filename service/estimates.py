"""What a conversion will need: memory and storage, from a few documented formulas.

A merge streams. Of its largest tensor it holds the stored bytes, and in float32 (4 bytes) the tensor, its change, and
one tensor of everything that is merged: 4 x (2 + number merged) x elements.

P: the base's parameters, 4 bytes each in float32. Copies of them that a step holds at its peak:

    prune      2    model, gradients (Taylor)
    recover    5    teacher, student, gradients, two AdamW moments
    quantize   5    the same; post-training: 2
    export     3    model, graph, its serialized form

Activations that a backward pass keeps, per layer and token, in float32 values: 8 hidden + 2 ffn + heads x length.
Measured on a 6-layer BERT (hidden 384, FFN 1536, 12 heads) at 128 tokens: 7,814 values where the formula gives 7,680.
With activation checkpointing one layer keeps them and every layer its input (Chen et al. 2016).

The process grows by more than what is kept: temporaries, the teacher's pass, memory that the allocator does not give
back. Growth between batches of 32 x 64 and 32 x 128 tokens, over that of the formula: 2.8 for Taylor pruning, 1.9 for
recovery, 1.6 for quantization-aware training.

What language models need stands in `service.language_estimates`.

`certain_bytes` leaves the activations out, and of a merge all but the stored bytes: less can never do. `peak_bytes`
takes every batch at its longest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from modelpress.evaluations import LanguageEvaluation
from modelpress.merge_recipes import Merge
from modelpress.recipes import Export, Prune, Quantize, Recipe, Recover, Stage, TrainingArguments
from service.language_estimates import CURE, candidate_bytes, language_memory, quantized_storage, scratch_bytes
from service.requests import ConversionRequest

FLOAT_BYTES = 4
CODES_PER_BYTE = 2
"""4-bit weights are packed in pairs."""
RUNTIME_BYTES = 420 << 20
"""torch, transformers and ONNX Runtime imported: 417 MiB resident when measured (CPU build)."""
EVIDENCE_BYTES = 8 << 20
"""Predictions, figures, report and signatures."""
TAYLOR_BATCH = 32
TAYLOR_GROWTH = 3
TRAINING_GROWTH = 2
"""Bytes that the process grows by for each byte of activations kept."""


@dataclass(frozen=True)
class Need:
    """Bytes, and what makes them fewer."""

    certain_bytes: int
    peak_bytes: int
    cure: str = "a smaller batch_size or max_length, or activation_checkpointing, needs less"


def memory_need(request: ConversionRequest, base: Mapping[str, Any]) -> Need:
    """Of the worker: the most that any of its steps needs."""
    if request.recipe.is_merge_only:
        return _merge_need(request, base)
    if isinstance(request.evaluation, LanguageEvaluation):
        certain, peak = language_memory(request.recipe, request.evaluation, base)
        return Need(RUNTIME_BYTES + certain, RUNTIME_BYTES + peak, cure=CURE)
    stages = [stage for stage in request.recipe.stages if not isinstance(stage, Merge)]
    model = FLOAT_BYTES * int(base["parameters"])
    certain = RUNTIME_BYTES + max(_copies(stage) for stage in stages) * model
    peak = RUNTIME_BYTES + max(_copies(stage) * model + _activations(stage, base) for stage in stages)
    return Need(certain, peak)


def _merge_need(request: ConversionRequest, base: Mapping[str, Any]) -> Need:
    merged = len(request.adapters) + len(request.models)
    elements = max(math.prod(shape) for shape in base["tensors"].values())
    return Need(
        certain_bytes=RUNTIME_BYTES + int(base["largest_tensor_bytes"]),
        peak_bytes=RUNTIME_BYTES + FLOAT_BYTES * (2 + merged) * elements,
        cure="merge fewer at once, or give the worker more memory",
    )


def storage_need(request: ConversionRequest, sizes: Iterable[int], base: Mapping[str, Any]) -> int:
    """Bytes on disk: inputs (`sizes`), each stage's model, the newest checkpoint, both exports, evidence, and what lies
    between the layers of a decoder while it is calibrated.
    """
    recipe = request.recipe
    if recipe.is_merge_only:
        return sum(sizes) + _merged_bytes(recipe.merge, base) + EVIDENCE_BYTES
    if isinstance(request.evaluation, LanguageEvaluation):
        merged = _merged_bytes(recipe.merge, base) if recipe.merge else 0
        made = merged + quantized_storage(recipe, base) + scratch_need(request, base)
        return sum(sizes) + made + EVIDENCE_BYTES
    model = FLOAT_BYTES * int(base["parameters"])
    trains = any(isinstance(stage, (Recover, Quantize)) for stage in recipe.stages)
    made = (len(recipe.stages) - 1) * model + (4 * model if trains else 0)
    return sum(sizes) + made + model + _classifier_bytes(recipe, base) + EVIDENCE_BYTES


def scratch_need(request: ConversionRequest, base: Mapping[str, Any]) -> int:
    """Bytes of that which lies on the worker's disk beside its inputs, and nowhere afterwards."""
    return scratch_bytes(request.recipe, base) if request.train else 0


def candidate_size(request: ConversionRequest, base: Mapping[str, Any]) -> int:
    """Bytes of the candidate's weights: of a classifier at most, before pruning; of a language model within 1 %."""
    if request.recipe.is_merge_only:
        return _merged_bytes(request.recipe.merge, base)
    if isinstance(request.evaluation, LanguageEvaluation):
        return candidate_bytes(request.recipe, base)
    return _classifier_bytes(request.recipe, base)


def _classifier_bytes(recipe: Recipe, base: Mapping[str, Any]) -> int:
    model = FLOAT_BYTES * int(base["parameters"])
    return model // 4 if any(isinstance(stage, Quantize) for stage in recipe.stages) else model


def _merged_bytes(merge: Merge | None, base: Mapping[str, Any]) -> int:
    """At most: as many as the base's; in float32 where the merge widens them, or reads 4-bit weights."""
    stored = int(base["weight_bytes"])
    if base["quantization"]:
        return FLOAT_BYTES * CODES_PER_BYTE * int(base["parameters"])
    widened = FLOAT_BYTES * int(base["parameters"])
    return max(stored, widened) if merge and merge.output_dtype != "stored" else stored


def _copies(stage: Stage) -> int:
    if isinstance(stage, Recover) or (isinstance(stage, Quantize) and stage.scheme == "int8_qat"):
        return 5
    return 3 if isinstance(stage, Export) else 2


def _activations(stage: Stage, base: Mapping[str, Any]) -> int:
    """Bytes that the stage's backward pass keeps; 0 where it has none."""
    if isinstance(stage, TrainingArguments):
        length = min(stage.max_length, base["max_positions"])
        return TRAINING_GROWTH * _kept(stage.batch_size, length, base, checkpointing=stage.activation_checkpointing)
    if isinstance(stage, Prune) and stage.importance == "taylor":
        length = min(TrainingArguments().max_length, base["max_positions"])
        return TAYLOR_GROWTH * _kept(TAYLOR_BATCH, length, base, checkpointing=False)
    return 0


def _kept(batch_size: int, length: int, base: Mapping[str, Any], *, checkpointing: bool) -> int:
    layer = 8 * base["hidden"] + 2 * base["ffn"] + base["heads"] * length
    values = base["layers"] * base["hidden"] + layer if checkpointing else base["layers"] * layer
    return int(FLOAT_BYTES * batch_size * length * values)
