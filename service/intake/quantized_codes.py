"""Codes that bitsandbytes stored: without the tensors beside them nobody knows the numbers that they stand for.

Beside a 4-bit weight `X.weight`, packed two to a byte as U8 [n, 1], stand `X.weight.absmax`, `X.weight.quant_map` and
`X.weight.quant_state.bitsandbytes__nf4` (or fp4), with double quantization two more; beside an 8-bit one `X.SCB`. A
loader that is not strict passes over them and computes with noise.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from modelpress.errors import InvalidModel
from service.intake.weights import Weight

METHOD = "bitsandbytes"
SCALES = ("absmax", "quant_map")
STATE = "quant_state.bitsandbytes__"
NESTED = ("nested_absmax", "nested_quant_map")


def refuse_stripped_codes(weights: Mapping[str, Weight], *, method: str | None) -> None:
    """InvalidModel names the first weight that lacks a part, and every part that it lacks.

    `method`: what the config says that the weights were quantized with; None for nothing, where packed weights are
    bitsandbytes' all the same.
    """
    if method not in (None, METHOD):
        return
    for name, weight in weights.items():
        if _is_packed(name, weight, weights):
            parts = _parts_of_4bit(name, weights)
        else:
            parts = _parts_of_8bit(name, weight) if method == METHOD else []
        missing = [part for part in parts if part not in weights]
        if missing:
            raise InvalidModel(
                f"{weight.file.path}: tensor {name!r} holds quantized codes and lacks {', '.join(missing)}, which say "
                "what the codes stand for: save the model again with `save_pretrained`, or upload the full-precision "
                "model",
                reason="STRIPPED_CODES",
                field=name,
            )


def _is_packed(name: str, weight: Weight, weights: Collection[str]) -> bool:
    """Whether a tensor is a 4-bit weight: by its layout, or by any part beside it."""
    has_layout = weight.tensor.dtype == "U8" and len(weight.tensor.shape) == 2 and weight.tensor.shape[1] == 1
    parts = (*SCALES, *NESTED)
    return (has_layout and name.rpartition(".")[2] == "weight") or any(f"{name}.{part}" in weights for part in parts)


def _parts_of_4bit(name: str, weights: Collection[str]) -> list[str]:
    """What must stand beside it: a state of either format, the scales, and the scales' own where any are there."""
    states = [f"{name}.{STATE}{kind}" for kind in ("nf4", "fp4")]
    state = next((found for found in states if found in weights), states[0])
    has_nested = any(f"{name}.{part}" in weights for part in NESTED)
    return [state, *(f"{name}.{part}" for part in (*SCALES, *(NESTED if has_nested else ())))]


def _parts_of_8bit(name: str, weight: Weight) -> list[str]:
    is_codes = weight.tensor.dtype == "I8" and name.rpartition(".")[2] == "weight"
    return [f"{name.removesuffix('weight')}SCB"] if is_codes else []
