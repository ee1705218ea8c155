"""A model that bitsandbytes quantized, as transformers saves it: which tensors make up a weight, and its FP32 values.

    for name, quantized in quantized_weights(files.tensors).items():
        weight = read_quantized(quantized, files.load)
        weight.shape, weight.dtype, quantized.helpers
        dequantize(weight, {part: files.load(stored) for part, stored in quantized.parts.items()})

Beside a 4-bit weight `X.weight` stand `X.weight.absmax`, `.quant_map`, `.quant_state.bitsandbytes__nf4` (or fp4) and,
with double quantization, `.nested_absmax` and `.nested_quant_map`; beside an 8-bit one `X.SCB` and `X.weight_format`.
Nothing of bitsandbytes is called, so no weight is repacked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from compressors.bitsandbytes_codes import CODES, from_4bit, from_8bit_blocks, from_int8_rows
from compressors.stored_tensors import Stored
from modelpress.documents import Document, read_value
from modelpress.errors import InvalidModel
from modelpress.strict_json import JsonError, read_object

Scheme = Literal["nf4", "fp4", "int8"]
STATES: Mapping[str, Scheme] = {"quant_state.bitsandbytes__nf4": "nf4", "quant_state.bitsandbytes__fp4": "fp4"}
PLAIN = ("absmax", "quant_map")
NESTED = ("nested_absmax", "nested_quant_map")
DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
MAX_STATE_BYTES = 4096
CURE = "save the model again with save_pretrained, or name the full-precision base"
Dtype = Literal["float32", "bfloat16", "float16"]
BlockSize = Literal[32, 64, 128, 256, 512, 1024, 2048, 4096]


class State(Document):
    """The JSON beside a 4-bit weight: its shape and dtype, and how many values share a scale."""

    quant_type: Literal["nf4", "fp4"]
    blocksize: BlockSize
    dtype: Dtype
    shape: Annotated[tuple[Annotated[int, Field(ge=1, lt=2**31)], ...], Field(min_length=1, max_length=8)]


class NestedState(State):
    """With double quantization: the scales are 8-bit codes, in blocks of their own, shifted by an offset."""

    nested_blocksize: BlockSize
    nested_dtype: Dtype
    nested_offset: float


@dataclass(frozen=True)
class QuantizedWeight:
    """The stored tensors of one weight by part: `weight` holds the codes, the others what they stand for."""

    name: str
    scheme: Scheme
    parts: Mapping[str, str]
    stored: Mapping[str, Stored]
    """Shape and dtype of each part."""

    @property
    def helpers(self) -> tuple[str, ...]:
        """The tensors that only the quantized form has."""
        return tuple(name for part, name in self.parts.items() if part != "weight")


@dataclass(frozen=True)
class Dequantized:
    """What the weight is without its quantization. `dtype` is None for int8, which does not store it."""

    quantized: QuantizedWeight
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    state: State | None = None
    """What the 4-bit codes stand for; None for int8."""


def quantized_weights(tensors: Mapping[str, Stored]) -> dict[str, QuantizedWeight]:
    """The quantized weights of a model by name; InvalidModel where one lacks a part, or a part lacks its weight."""
    found: dict[str, QuantizedWeight] = {}
    for name, stored in tensors.items():
        weight = _weight_of(name, stored)
        if weight is None or weight in found:
            continue
        if weight not in tensors:
            raise InvalidModel(f"tensor {name!r} has no {weight!r} that it belongs to: {CURE}", field=name)
        scheme, parts = _parts(weight, tensors)
        found[weight] = QuantizedWeight(weight, scheme, parts, {part: tensors[parts[part]] for part in parts})
    return found


def _weight_of(name: str, stored: Stored) -> str | None:
    """The quantized weight that a tensor is, or is a part of; None for other tensors."""
    for part in (*PLAIN, *NESTED, *STATES):
        if name.endswith(f".{part}"):
            return name.removesuffix(f".{part}")
    for part in ("SCB", "weight_format"):
        if name.endswith(f".{part}"):
            return name.removesuffix(part) + "weight"
    return name if stored.dtype in (torch.uint8, torch.int8) else None


def _parts(weight: str, tensors: Mapping[str, Stored]) -> tuple[Scheme, dict[str, str]]:
    if tensors[weight].dtype == torch.int8 and f"{weight}.absmax" not in tensors:
        rows = {part: weight.removesuffix("weight") + part for part in ("SCB", "weight_format")}
        _need(weight, (rows["SCB"],), tensors)
        return "int8", {"weight": weight, **{part: name for part, name in rows.items() if name in tensors}}
    states = [state for state in STATES if f"{weight}.{state}" in tensors] or ["quant_state.bitsandbytes__nf4"]
    nested = NESTED if any(f"{weight}.{part}" in tensors for part in NESTED) else ()
    parts = {part: f"{weight}.{part}" for part in (*PLAIN, *nested)}
    _need(weight, (*(f"{weight}.{state}" for state in states), *parts.values()), tensors)
    if len(states) > 1:
        raise InvalidModel(f"tensor {weight!r} has a quant_state of nf4 and one of fp4: {CURE}", field=weight)
    return STATES[states[0]], {"weight": weight, "quant_state": f"{weight}.{states[0]}", **parts}


def _need(weight: str, names: Iterable[str], tensors: Mapping[str, Stored]) -> None:
    missing = [name for name in names if name not in tensors]
    if missing:
        raise InvalidModel(f"tensor {weight!r} is quantized and lacks {', '.join(missing)}: {CURE}", field=weight)


def read_quantized(weight: QuantizedWeight, load: Callable[[str], Tensor]) -> Dequantized:
    """Read what the codes stand for, and check every part's size and dtype against it. `load` gives small tensors."""
    if weight.scheme == "int8":
        return _read_int8(weight, load)
    state = _read_state(weight, load)
    count = math.prod(state.shape)
    blocks = -(-count // state.blocksize)
    _check_shape(weight, "weight", (-(-count // (2 * weight.stored["weight"].dtype.itemsize)), 1))
    _check_shape(weight, "absmax", (blocks,))
    _check_shape(weight, "quant_map", (16,))
    if not torch.allclose(load(weight.parts["quant_map"]).float(), torch.tensor(CODES[weight.scheme]), atol=1e-6):
        raise _wrong(weight.parts["quant_map"], f"other values than those of {weight.scheme}")
    _check_dtype(weight, "absmax", is_code=isinstance(state, NestedState))
    if isinstance(state, NestedState):
        _check_shape(weight, "nested_absmax", (-(-blocks // state.nested_blocksize),))
        _check_shape(weight, "nested_quant_map", (256,))
        for part in NESTED:
            _check_dtype(weight, part, is_code=False)
    return Dequantized(weight, state.shape, DTYPES[state.dtype], state)


def dequantize(weight: Dequantized, parts: Mapping[str, Tensor]) -> Tensor:
    """The weight in FP32 and its own shape. `parts` are by part, as in `QuantizedWeight.parts`, the codes included.

    InvalidModel where the scales are not finite.
    """
    if weight.state is None:
        return from_int8_rows(parts["weight"], _finite(weight, "SCB", parts))
    values = from_4bit(
        parts["weight"].reshape(-1).view(torch.uint8),
        _scales(weight, parts),
        code=torch.tensor(CODES[weight.quantized.scheme]),
        blocksize=weight.state.blocksize,
        count=math.prod(weight.shape),
    )
    return values.reshape(weight.shape)


def _scales(weight: Dequantized, parts: Mapping[str, Tensor]) -> Tensor:
    if not isinstance(weight.state, NestedState):
        return _finite(weight, "absmax", parts)
    scales = from_8bit_blocks(
        parts["absmax"],
        _finite(weight, "nested_absmax", parts),
        code=_finite(weight, "nested_quant_map", parts),
        blocksize=weight.state.nested_blocksize,
    )
    return scales.add_(weight.state.nested_offset)


def _read_int8(weight: QuantizedWeight, load: Callable[[str], Tensor]) -> Dequantized:
    shape = tuple(weight.stored["weight"].shape)
    if len(shape) != 2:
        raise _wrong(weight.name, f"shape {list(shape)}, expected [outputs, inputs]")
    _check_shape(weight, "SCB", (shape[0],))
    _check_dtype(weight, "SCB", is_code=False)
    if "weight_format" in weight.parts:
        layout = load(weight.parts["weight_format"])
        if layout.numel() != 1 or int(layout) != 0:
            raise _wrong(weight.parts["weight_format"], f"{layout.tolist()}, expected 0 for rows")
    return Dequantized(weight, shape)


def _read_state(weight: QuantizedWeight, load: Callable[[str], Tensor]) -> State | NestedState:
    """The JSON of the quant_state tensor, with exactly the fields that its parts need."""
    name, stored = weight.parts["quant_state"], weight.stored["quant_state"]
    if stored.dtype != torch.uint8 or len(stored.shape) != 1 or stored.shape[0] > MAX_STATE_BYTES:
        raise _wrong(name, f"{stored.dtype} {list(stored.shape)}, expected at most {MAX_STATE_BYTES} bytes of JSON")
    kind = NestedState if "nested_absmax" in weight.parts else State
    try:
        state = read_value(kind, read_object(bytes(load(name).tolist())), InvalidModel)
    except JsonError as fault:
        raise InvalidModel(f"tensor {name!r} {fault}: {CURE}", field=name) from None
    except InvalidModel as fault:
        raise _wrong(name, f"JSON that is no quant_state ({fault.message})") from None
    if state.quant_type != weight.scheme:
        raise _wrong(name, f"quant_type {state.quant_type!r}, expected {weight.scheme!r}")
    return state


def _check_shape(weight: QuantizedWeight, part: str, expected: tuple[int, ...]) -> None:
    if tuple(weight.stored[part].shape) != expected:
        raise _wrong(weight.parts[part], f"shape {list(weight.stored[part].shape)}, expected {list(expected)}")


def _check_dtype(weight: QuantizedWeight, part: str, *, is_code: bool) -> None:
    dtype = weight.stored[part].dtype
    if dtype != torch.uint8 if is_code else not dtype.is_floating_point:
        raise _wrong(weight.parts[part], f"{dtype}, expected {'uint8' if is_code else 'floating point'}")


def _finite(weight: Dequantized, part: str, parts: Mapping[str, Tensor]) -> Tensor:
    scales = parts[part].float()
    if not torch.isfinite(scales).all():
        name = weight.quantized.parts[part]
        raise InvalidModel(f"tensor {name!r} holds NaN or infinite values: {CURE}", reason="NON_FINITE", field=name)
    return scales


def _wrong(name: str, what: str) -> InvalidModel:
    return InvalidModel(f"tensor {name!r} has {what}: {CURE}", field=name)
