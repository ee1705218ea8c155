"""What the report page says of the linear layers that a stage quantized."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from modelpress.quantization_reports import QuantizedLayer
from modelpress.quantized_layers import is_float
from service.report.svg import short

NOTHING = "–"


@dataclass(frozen=True)
class LayerRow:
    """One line of the table; `gain` is the error over that of rounding."""

    name: str
    grid: str
    algorithm: str
    error: str
    rounding: str
    gain: str
    seconds: str
    fallback: str


def layer_rows(layers: Sequence[QuantizedLayer]) -> list[LayerRow]:
    return [_row(layer) for layer in layers]


def layer_summary(layers: Sequence[QuantizedLayer]) -> str:
    """E.g. `208 linear layers in 4 bits by gptq, 1 in 4 bits by rtn, 1 kept in 16 bits`."""
    counts = Counter((layer.num_bits, layer.algorithm) for layer in layers)
    parts = [
        f"{count:,} kept in {bits} bits" if algorithm == "none" else f"{count:,} in {bits} bits by {algorithm}"
        for (bits, algorithm), count in counts.most_common()
    ]
    return f"Linear layers of the decoder: {', '.join(parts)}."


def error_summary(layers: Sequence[QuantizedLayer]) -> str:
    """The median error beside that of rounding; why there is none where nothing was measured."""
    quantized = [layer for layer in layers if not is_float(layer)]
    errors = [layer.error for layer in quantized if layer.error is not None]
    if not errors:
        return "No error of an output was measured: nothing was calibrated."
    rounding = [layer.rounding_error for layer in quantized if layer.rounding_error is not None]
    beside = f"; by rounding to nearest {short(statistics.median(rounding))}" if rounding else ""
    return f"Median error of a layer's output on the calibration inputs: {short(statistics.median(errors))}{beside}."


def _row(layer: QuantizedLayer) -> LayerRow:
    gain = layer.error / layer.rounding_error if layer.error is not None and layer.rounding_error else None
    groups = f", groups of {layer.group_size}" if layer.group_size else ""
    return LayerRow(
        name=layer.name,
        grid=f"{layer.num_bits} bits{groups}",
        algorithm=NOTHING if is_float(layer) else layer.algorithm,
        error=_figure(layer.error),
        rounding=_figure(layer.rounding_error),
        gain=NOTHING if gain is None else f"{short(gain)}x",
        seconds=f"{layer.seconds:.1f} s",
        fallback=layer.fallback,
    )


def _figure(value: float | None) -> str:
    return NOTHING if value is None else short(value)
