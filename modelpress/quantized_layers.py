"""What quantizing stages noted of each linear layer: for the service's report, and for verification again."""

from __future__ import annotations

import math
from collections.abc import Sequence

from modelpress.contradictions import require
from modelpress.documents import read_value
from modelpress.errors import InvalidRequest, VerificationFailed
from modelpress.quantization_recipes import QuantizeWeights
from modelpress.quantization_reports import QuantizedLayer
from modelpress.reports import Report, StageRecord

FLOAT = "none"
"""The algorithm of a layer that stayed float."""


def quantizing_stage(report: Report) -> StageRecord | None:
    """The stage that quantized a decoder's weights; a recipe has at most one."""
    return next((stage for stage in report.stages if stage.method == "quantize_weights"), None)


def is_float(layer: QuantizedLayer) -> bool:
    return layer.algorithm == FLOAT


def check_layers(report: Report) -> None:
    """Raise VerificationFailed where the layers of the quantizing stage cannot be what its arguments ask for."""
    stage = quantizing_stage(report)
    if stage is None:
        return
    try:
        arguments = read_value(QuantizeWeights, stage.arguments, InvalidRequest)
    except InvalidRequest as fault:
        raise VerificationFailed(f"the record of {stage.method}: {fault.message}") from None
    names = [layer.name for layer in stage.layers]
    require(len(set(names)) == len(names), f"{stage.method} names a layer twice")
    for layer in stage.layers:
        _check_layer(layer, arguments)
    _check_fallbacks(stage.layers, arguments)


def _check_layer(layer: QuantizedLayer, arguments: QuantizeWeights) -> None:
    name = f"layer {layer.name[:120]!r}"
    for figure in ("error", "rounding_error", "seconds"):
        value = getattr(layer, figure)
        require(value is None or 0 <= value < math.inf, f"{figure} of {name} is {value}")
    bits = (16, 32) if is_float(layer) else (arguments.num_bits,)
    allowed = " or ".join(map(str, bits))
    require(layer.num_bits in bits, f"{name} by {layer.algorithm!r} has {layer.num_bits} bits, expected {allowed}")
    as_asked = is_float(layer) or layer.algorithm == arguments.algorithm or bool(layer.fallback)
    require(
        as_asked, f"{name} was quantized by {layer.algorithm!r} instead of {arguments.algorithm!r} without a reason"
    )


def _check_fallbacks(layers: Sequence[QuantizedLayer], arguments: QuantizeWeights) -> None:
    quantized = sum(not is_float(layer) for layer in layers)
    require(quantized > 0, "quantize_weights quantized no layer")
    fallen = sum(bool(layer.fallback) for layer in layers)
    targets = quantized + sum(is_float(layer) and bool(layer.fallback) for layer in layers)
    limit = arguments.max_fallback_share
    require(fallen <= limit * targets + 1e-9, f"{fallen} of {targets} layers fell back, above the limit of {limit:g}")
