"""What the conversion of a language model will need, beside its merge: memory, storage, and the candidate's size.

P: the base's parameters, 4 bytes each in float32. What a step holds:

    quantize_weights   3 x L x 4            L: parameters of one decoder layer: it, its like while it is chosen, the
                                            running best or the codes
                       2 x I x I x 4        I: the widest input of a linear layer: the products of its inputs and their
                                            factor (GPTQ)
                       the activations of 4,096 tokens in one layer, in float32: 8 hidden + 2 ffn + heads x window
                       for each token; what lies between the layers is on disk
    qat                2 x P x 4            P: teacher and student
                       5 x Q x 4            Q: trained weights, those of the targets: as they are rounded for a step,
                                            the gradients of both, two AdamW moments
                       2 x Q                codes of 8 bits: the start's, and those of a step
                       2 x Q x 4            copies in bfloat16, and what the allocator keeps: growth beyond the other
                                            lines was 1.9 when measured, P of 27 million
                       2 x layers x the activations of one window; 4 x window x vocabulary x 4 for the teacher's and the
                       student's logits and their logarithms; a window is `sequence_length`
    export (ONNX)      3 x P x 4            model, graph, its serialized form; 64 MiB for the exporter itself
    compare            2 x P x 4            baseline and candidate in float32, open side by side: read, not mapped
                       the base's files     of the second model, as they are stored, until it is open
                       2 x batch x window x vocabulary x 4    logits of both
                       4 x 16 x vocabulary x 8                what is computed of 16 tokens at a time, in float64

`certain_bytes` leaves activations, logits, codes, the stored form of an opened model and the allocator's share out:
less can never do. The exports to safetensors stream.

On the worker's disk, while a stage is calibrated with N windows of T tokens: 2 x N x T x hidden x 4, the inputs of one
layer and of the next; for `signround` half as much again, the outputs of the unquantized layer.

The candidate's weights are those that `compressors.quantized_sizes` lists. GPTQ files always hold zero points, and the
group of every input; ONNX holds what stays float, and scales, in float32, and a graph: 5.0 kB, 10.3 for each layer and
0.4 for each quantized linear layer beyond their share of a safetensors header, as measured on Llamas of 2 and 5 layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from compressors.decoder_families import DECODERS
from compressors.decoder_targets import choose_targets
from compressors.quantized_sizes import predicted_weight_bytes
from modelpress.evaluations import LanguageEvaluation
from modelpress.quantization_recipes import NEEDS_WANTED, QuantizeWeights
from modelpress.recipes import Recipe

FLOAT_BYTES = 4
INDEX_BYTES = 4
CALIBRATED_FILES, AIMED_FILES = 2, 1
LAYER_COPIES = 3
QAT_MODELS, QAT_WEIGHTS, QAT_CODES, QAT_GROWTH, QAT_LOGITS = 2, 5, 2, 2, 4
ADAMW_COPIES = 3
"""Weights and two moments: what a checkpoint holds of each weight."""
ONNX_COPIES = 3
OPEN_MODELS = 2
COMPARED_TOKENS, COMPARED_TABLES, DOUBLE_BYTES = 16, 4, 8
GRAPH_BYTES, GRAPH_LAYER_BYTES, GRAPH_PRODUCT_BYTES = 5_000, 10_300, 400
EXPORTER_BYTES = 64 << 20
"""What torch's exporter itself takes: measured on models of 0.3 MB."""
BATCH_TOKENS = 4096
"""Of one forward pass of a layer."""
CURE = "a smaller window or batch_size of the evaluation, or sequence_length of the recipe, needs less"


def language_memory(recipe: Recipe, evaluation: LanguageEvaluation, base: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes that are certain, and at the peak, without the runtime's own."""
    model = FLOAT_BYTES * int(base["parameters"])
    logits = OPEN_MODELS * evaluation.batch_size * evaluation.window * base["vocabulary"] * FLOAT_BYTES
    logits += COMPARED_TABLES * COMPARED_TOKENS * base["vocabulary"] * DOUBLE_BYTES
    certain, peak = [OPEN_MODELS * model], [OPEN_MODELS * model + int(base["weight_bytes"]) + logits]
    if recipe.export.format == "onnx":
        certain, peak = [*certain, ONNX_COPIES * model], [*peak, ONNX_COPIES * model + EXPORTER_BYTES]
    if stage := recipe.quantize_weights:
        held, most = (_trained if stage.algorithm == "qat" else _streamed)(stage, base)
        certain, peak = [*certain, held], [*peak, most]
    return max(certain), max(peak)


def _streamed(stage: QuantizeWeights, base: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes of a stage that holds one decoder layer: certain, and at the peak."""
    held = LAYER_COPIES * _layer_bytes(base) + _products(base)
    return held, held + _activations(max(BATCH_TOKENS, stage.sequence_length), stage, base)


def _trained(stage: QuantizeWeights, base: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes of a stage that trains the whole model: certain, and at the peak."""
    weights = _trained_weights(stage, base)
    held = FLOAT_BYTES * (QAT_MODELS * int(base["parameters"]) + QAT_WEIGHTS * weights)
    kept = QAT_GROWTH * base["layers"] * _activations(stage.sequence_length, stage, base)
    logits = FLOAT_BYTES * QAT_LOGITS * stage.sequence_length * base["vocabulary"]
    return held, held + (QAT_CODES + FLOAT_BYTES * QAT_GROWTH) * weights + kept + logits


def candidate_bytes(recipe: Recipe, base: Mapping[str, Any]) -> int:
    """The candidate's weight files, from the base's shapes and dtypes: those that a merge widens are larger."""
    stage = recipe.quantize_weights
    if stage is None:
        return FLOAT_BYTES * int(base["parameters"]) + _graph_bytes(base, products=0)
    products = _targets(stage, base)
    dtypes = {name: stored_dtype(name, base) for name in base["tensors"]}
    beside = 0
    if recipe.export.format == "onnx":
        dtypes = dict.fromkeys(base["tensors"], "F32")
        stage = stage.model_copy(update={"scale_dtype": "float32"})
        beside = _graph_bytes(base, products=len(products))
    if recipe.export.format == "gptq":
        stage = stage.model_copy(update={"symmetric": False})
        beside = sum(INDEX_BYTES * int(base["tensors"][f"{name}.weight"][1]) for name in products)
    family = DECODERS[base["model_type"]]
    return predicted_weight_bytes(base["tensors"], dtypes, stage=stage, family=family) + beside


def stored_dtype(tensor: str, base: Mapping[str, Any]) -> str:
    """By safetensors' name, e.g. `BF16`."""
    return str(base["other_dtypes"].get(tensor, base["dtype"]))


def quantized_storage(recipe: Recipe, base: Mapping[str, Any]) -> int:
    """Bytes that the stages after the merge leave in the store."""
    candidate = candidate_bytes(recipe, base)
    model = FLOAT_BYTES * int(base["parameters"])
    stage = recipe.quantize_weights
    trained = _trained_weights(stage, base) if stage and stage.algorithm == "qat" else 0
    exports = candidate + (model if recipe.export.format == "onnx" else 0)
    return exports + ADAMW_COPIES * FLOAT_BYTES * trained + (candidate if stage else 0)


def scratch_bytes(recipe: Recipe, base: Mapping[str, Any]) -> int:
    """Bytes that calibration leaves on the worker's disk at most, where the training texts fill all windows."""
    stage = recipe.quantize_weights
    if stage is None:
        return 0
    files = CALIBRATED_FILES + (AIMED_FILES if stage.algorithm in NEEDS_WANTED else 0)
    return files * FLOAT_BYTES * stage.calibration_samples * stage.sequence_length * int(base["hidden"])


def _layer_bytes(base: Mapping[str, Any]) -> int:
    """Of one decoder layer in float32."""
    first = f"{DECODERS[base['model_type']].layer(0)}."
    tensors: Mapping[str, list[int]] = base["tensors"]
    return FLOAT_BYTES * sum(math.prod(shape) for name, shape in tensors.items() if name.startswith(first))


def _products(base: Mapping[str, Any]) -> int:
    widest = max(base["ffn"], base["hidden"], base["heads"] * base["head_dim"])
    return 2 * FLOAT_BYTES * int(widest) ** 2


def _trained_weights(stage: QuantizeWeights, base: Mapping[str, Any]) -> int:
    return sum(math.prod(base["tensors"][f"{name}.weight"]) for name in _targets(stage, base))


def _activations(tokens: int, stage: QuantizeWeights, base: Mapping[str, Any]) -> int:
    """Of so many tokens in one layer."""
    values = 8 * base["hidden"] + 2 * base["ffn"] + base["heads"] * stage.sequence_length
    return FLOAT_BYTES * tokens * int(values)


def _targets(stage: QuantizeWeights, base: Mapping[str, Any]) -> tuple[str, ...]:
    return choose_targets(stage, DECODERS[base["model_type"]], layers=base["layers"]).quantized


def _graph_bytes(base: Mapping[str, Any], *, products: int) -> int:
    return GRAPH_BYTES + GRAPH_LAYER_BYTES * int(base["layers"]) + GRAPH_PRODUCT_BYTES * products
