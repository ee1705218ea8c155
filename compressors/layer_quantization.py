"""One decoder layer quantized: what the algorithm chose, checked, measured and laid out as it is stored.

The layer is loaded anew for the measurement: an algorithm may leave its own copy in any state.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from compressors.activations import Activations
from compressors.layer_algorithms import LayerAlgorithm, LayerOutcome, LayerWork
from compressors.layer_errors import gram_matrices, relative_error
from compressors.quantization_plan import QuantizationPlan
from compressors.rtn import plain_rounding
from compressors.smooth_quant import smooth_layer
from modelpress.errors import InvalidModel
from modelpress.quantization_recipes import QuantizeWeights
from modelpress.quantization_reports import QuantizedLayer

ERROR_TOKENS = 2048
"""Calibration tokens that the recorded errors are measured on."""
SEED_STEP = 1_000_003


@dataclass(frozen=True, eq=False)
class LayerInput:
    """What one decoder layer reads: nothing where the recipe is not calibrated."""

    activations: Activations | None
    arguments: Mapping[str, Any]
    """Keyword arguments of the layer's forward pass."""
    wanted: Activations | None = None
    """What the unquantized model's layer puts out, for an algorithm of `NEEDS_WANTED`."""


@dataclass(frozen=True, eq=False)
class QuantizedTensors:
    """What is stored of the layer, by full names, and what the record says of it."""

    tensors: Mapping[str, Tensor]
    records: tuple[QuantizedLayer, ...]
    details: Mapping[str, float]


@dataclass(frozen=True)
class Errors:
    """By linear layer, as `QuantizedLayer` has them."""

    chosen: Mapping[str, float | None]
    rounding: Mapping[str, float | None]


def quantize_layer(
    plan: QuantizationPlan, number: int, given: LayerInput, *, algorithm: LayerAlgorithm, seed: int
) -> QuantizedTensors:
    """InvalidModel where a scale or a changed tensor is not finite in the dtype that is stored."""
    started = time.perf_counter()
    outcome = _outcome(plan, layer_work(plan, number, given, seed=seed), algorithm)
    seconds = time.perf_counter() - started
    tensors = _stored(plan, number, outcome)
    errors = _errors(plan, layer_work(plan, number, given, seed=seed), outcome)
    return QuantizedTensors(tensors, _records(plan, number, outcome, errors=errors, seconds=seconds), outcome.details)


def layer_work(plan: QuantizationPlan, number: int, given: LayerInput, *, seed: int) -> LayerWork:
    """Decoder layer `number` of the base, in memory."""
    decoder = plan.decoder
    module = decoder.load(number)
    return LayerWork(
        name=decoder.family.layer(number),
        module=module,
        linears={name: cast(nn.Linear, module.get_submodule(name)) for name in plan.linears(number)},
        groups=plan.groups(number),
        inputs=given.activations,
        arguments=given.arguments,
        grid=plan.grid,
        device=decoder.device,
        seed=seed + SEED_STEP * number,
        wanted=given.wanted,
    )


def _outcome(plan: QuantizationPlan, work: LayerWork, algorithm: LayerAlgorithm) -> LayerOutcome:
    """What the algorithm chooses, after SmoothQuant where the recipe asks for it."""
    if not work.linears:
        return LayerOutcome({})
    smoothed = smooth_layer(work, plan.arguments)
    outcome = algorithm(work, plan.arguments)
    codes = {f"{name}.weight" for name in outcome.weights}
    changed = {name: tensor for name, tensor in smoothed.items() if name not in codes}
    rescaled = {name: tensor for name, tensor in smoothed.items() if name in codes}
    return replace(outcome, changed={**changed, **outcome.changed}, rescaled={**rescaled, **outcome.rescaled})


@torch.no_grad()
def put(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Write these tensors, by their names inside the layer, over its own."""
    for name, tensor in tensors.items():
        module.get_parameter(name).copy_(tensor)


def _stored(plan: QuantizationPlan, number: int, outcome: LayerOutcome) -> dict[str, Tensor]:
    """Codes where there are, what changed in the base's dtype, everything else as the base has it."""
    decoder, prefix = plan.decoder, plan.decoder.family.layer(number)
    tensors: dict[str, Tensor] = {}
    for full_name in decoder.stored_names(number):
        name = full_name.removeprefix(f"{prefix}.")
        linear = name.removesuffix(".weight")
        if linear in outcome.weights:
            tensors |= plan.layout.stored(f"{prefix}.{linear}", outcome.weights[linear])
        elif name in outcome.changed:
            tensors[full_name] = outcome.changed[name].to("cpu", decoder.files.tensors[full_name].dtype)
        else:
            tensors[full_name] = decoder.files.load(full_name)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise InvalidModel(
                f"tensor {name!r} of the quantized model does not fit {dtype}: set scale_dtype to float32 (which "
                "'gptq' files cannot hold: export another format), or save the model in float32",
                reason="OVERFLOW",
                field=name,
            )
    return tensors


def error_windows(arguments: QuantizeWeights) -> int:
    """Calibration windows, the first ones, that errors are measured on, where there are so many."""
    return max(1, ERROR_TOKENS // arguments.sequence_length)


def _errors(plan: QuantizationPlan, work: LayerWork, outcome: LayerOutcome) -> Errors:
    """Of the chosen codes against the layer that they stand for, of plain rounding against the base's."""
    inputs = work.inputs
    if inputs is None or not outcome.weights:
        return Errors({}, {})
    windows_BTH = next(inputs.batches(error_windows(plan.arguments)))
    grams = gram_matrices(work.module, work.groups, batches=[windows_BTH], run=work.run)
    rounded = plain_rounding(work.grid, plan.arguments)
    rounding = {
        name: relative_error(linear.weight, rounded(linear.weight).dequantized(), gram_II=grams[name])
        for name, linear in work.linears.items()
    }
    if outcome.changed or outcome.rescaled:
        put(work.module, {**outcome.changed, **outcome.rescaled})
        grams = gram_matrices(work.module, work.groups, batches=[windows_BTH], run=work.run)
    chosen = {
        name: relative_error(work.linears[name].weight, weight.dequantized(), gram_II=grams[name])
        for name, weight in outcome.weights.items()
    }
    return Errors(chosen, rounding)


def _records(
    plan: QuantizationPlan, number: int, outcome: LayerOutcome, *, errors: Errors, seconds: float
) -> tuple[QuantizedLayer, ...]:
    """One for every linear layer. The seconds are shared by the numbers of weights."""
    stored, prefix = plan.decoder.files.tensors, plan.decoder.family.layer(number)
    sizes = {name: stored[f"{prefix}.{name}.weight"].elements for name in outcome.weights}

    def record(name: str) -> QuantizedLayer:
        full_name = f"{prefix}.{name}"
        if name not in outcome.weights:
            bits = 8 * stored[f"{full_name}.weight"].dtype.itemsize
            fallback = plan.misfits.get(full_name) or outcome.fallbacks.get(name, "")
            return QuantizedLayer(
                name=full_name, algorithm="none", num_bits=bits, group_size=None, error=None, fallback=fallback
            )
        return QuantizedLayer(
            name=full_name,
            algorithm="rtn" if name in outcome.fallbacks else plan.arguments.algorithm,
            num_bits=plan.arguments.num_bits,
            group_size=plan.arguments.group_size,
            error=errors.chosen.get(name),
            rounding_error=errors.rounding.get(name),
            fallback=outcome.fallbacks.get(name, ""),
            seconds=seconds * sizes[name] / sum(sizes.values()),
        )

    return tuple(record(name) for name in plan.decoder.family.linears)
