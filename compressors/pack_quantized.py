"""Integer weights as compressed-tensors stores them, and as vLLM and transformers read them: tensors, and the config.

pack-quantized (w4a16, w8a16)
    X.weight_packed       int32 [O, ceil(I b / 32)]: codes + 2^(b-1), the first in the lowest bits of a word
    X.weight_scale        [O, G] in the grid's scale dtype
    X.weight_zero_point   int32 [ceil(O b / 32), G], asymmetric only: packed like the codes, but along the outputs
    X.weight_shape        int64 [2]: O, I
int-quantized (w8a8)
    X.weight              int8 [O, I]
    X.weight_scale        [O, 1]; activations get one symmetric scale per token while the model runs

Layout and config: compressed-tensors 0.20.0. A channel-wise scale has G = 1. Legend: O outputs, I inputs, G groups
along I, b bits a code, R rows, C columns, W = ceil(C b / 32) words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from compressors.integer_grid import IntegerGrid, QuantizedWeight
from modelpress.documents import Document, read_value
from modelpress.errors import InvalidModel
from modelpress.quantization_recipes import QuantizeWeights

METHOD = "compressed-tensors"
VERSION_OF_LAYOUT = "0.20.0"
FORMATS: Mapping[str, str] = {"w4a16": "pack-quantized", "w8a16": "pack-quantized", "w8a8": "int-quantized"}
"""Scheme -> what compressed-tensors calls the layout."""
GROUP = "group_0"
SCALE = ".weight_scale"
"""Ends the name of the tensor that every quantized module has in compressed-tensors."""
WORD_BITS = 32
CURE = "quantize the full-precision base again"


class StoredArgs(Document):
    """The config's `weights`: how codes are read."""

    num_bits: Literal[4, 8]
    type: Literal["int"]
    symmetric: bool
    strategy: Literal["group", "channel"]
    group_size: int | None = Field(default=None, ge=1)
    dynamic: Literal[False] = False


def stored_tensors(module: str, weight: QuantizedWeight, *, scheme: str) -> dict[str, Tensor]:
    """What is stored of the linear layer `module` beside its bias."""
    if FORMATS[scheme] == "int-quantized":
        return {f"{module}.weight": weight.codes_OI, f"{module}.weight_scale": weight.scales_OG}
    bits = weight.grid.num_bits
    tensors = {
        f"{module}.weight_packed": pack_columns(weight.codes_OI, bits),
        f"{module}.weight_scale": weight.scales_OG,
        f"{module}.weight_shape": torch.tensor(weight.codes_OI.shape),
    }
    if weight.zeros_OG is not None:
        tensors[f"{module}.weight_zero_point"] = pack_columns(weight.zeros_OG.T, bits).T.contiguous()
    return tensors


def read_weight(module: str, load: Callable[[str], Tensor], *, quantization: Mapping[str, Any]) -> QuantizedWeight:
    """The weight of which `stored_tensors` made these; `quantization` is the config's `quantization_config`.

    `load` gives a stored tensor by name. InvalidModel where what is stored is not of this layout.
    """
    layout, args = layout_of(quantization)
    scales_OG = load(f"{module}.weight_scale")
    grid = IntegerGrid(args.num_bits, args.symmetric, _group_size(args), scales_OG.dtype)
    if layout == "int-quantized":
        codes_OI = load(f"{module}.weight")
        _check(module, codes_OI.dtype == torch.int8 and codes_OI.dim() == 2, "weight is no int8 matrix")
    else:
        shape = _stored_shape(module, load)
        codes_OI = _unpacked(module, load(f"{module}.weight_packed"), shape=shape, num_bits=args.num_bits)
    outputs, inputs = codes_OI.shape
    _check(module, grid.fits(inputs), f"its {inputs} inputs are not divided by groups of {grid.group_size}")
    groups = grid.groups(inputs)
    _check(module, scales_OG.shape == (outputs, groups), f"weight_scale has shape {list(scales_OG.shape)}")
    _check(
        module, bool((scales_OG > 0).all() and scales_OG.isfinite().all()), "weight_scale is not finite and positive"
    )
    if args.symmetric:
        return QuantizedWeight(grid, codes_OI, scales_OG, None)
    words_GW = load(f"{module}.weight_zero_point").T
    zeros_GO = _unpacked(module, words_GW, shape=(groups, outputs), num_bits=args.num_bits)
    return QuantizedWeight(grid, codes_OI, scales_OG, zeros_GO.T.contiguous())


def layout_of(quantization: Mapping[str, Any]) -> tuple[str, StoredArgs]:
    """The layout's name and how its codes are read; InvalidModel where the config is not one that we write."""
    layout, groups = quantization.get("format"), quantization.get("config_groups")
    known = quantization.get("quant_method") == METHOD and layout in FORMATS.values()
    if not known or not isinstance(groups, Mapping) or list(groups) != [GROUP]:
        raise InvalidModel(
            f"quantization_config names {quantization.get('quant_method')!r} with format {layout!r}, expected one "
            f"group in {' or '.join(sorted(set(FORMATS.values())))} of {METHOD}: {CURE}",
            field="quantization_config",
        )
    return str(layout), read_value(StoredArgs, groups[GROUP].get("weights"), InvalidModel)


def quantization_config(arguments: QuantizeWeights, *, grid: IntegerGrid, ignored: Sequence[str]) -> dict[str, Any]:
    """The config's `quantization_config`, field by field as compressed-tensors itself writes it.

    `ignored` are all linear layers that stay float, the head among them.
    """
    layout = FORMATS[arguments.scheme]
    per_channel = grid.group_size is None
    weights = {
        **_integer_args(grid.num_bits, symmetric=grid.symmetric),
        "group_size": grid.group_size,
        "strategy": "channel" if per_channel else "group",
    }
    per_token = {**_integer_args(8, symmetric=True), "group_size": None, "strategy": "token", "dynamic": True}
    return {
        "config_groups": {
            GROUP: {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": per_token if arguments.scheme == "w8a8" else None,
                "output_activations": None,
                "format": layout,
            }
        },
        "quant_method": METHOD,
        "kv_cache_scheme": None,
        "format": layout,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": list(ignored),
        "moe_sparsity_config": None,
        "version": VERSION_OF_LAYOUT,
        "sparsity_config": {},
        "transform_config": {},
    }


def pack_columns(codes_RC: Tensor, num_bits: int) -> Tensor:
    """Signed codes of 4 or 8 bits, int8 [R, C], in words int32 [R, W]; the last word is filled up with zero bits.

    unpack_columns(pack_columns(codes, b), b, columns=C) == codes.
    """
    per_word = WORD_BITS // num_bits
    unsigned_RC = (codes_RC.view(torch.uint8) + (1 << (num_bits - 1))) & ((1 << num_bits) - 1)
    padded_RC = torch.nn.functional.pad(unsigned_RC, (0, -codes_RC.shape[1] % per_word))
    words_RW = torch.zeros_like(padded_RC[:, ::per_word], dtype=torch.int32)
    for place in range(per_word):
        words_RW |= padded_RC[:, place::per_word].int() << (num_bits * place)
    return words_RW


def unpack_columns(words_RW: Tensor, num_bits: int, *, columns: int) -> Tensor:
    """The signed codes, int8 [R, C]."""
    places = range(WORD_BITS // num_bits)
    mask, offset = (1 << num_bits) - 1, 1 << (num_bits - 1)
    unsigned = torch.stack([((words_RW >> (num_bits * place)) & mask).to(torch.uint8) for place in places], dim=-1)
    return (unsigned.reshape(len(words_RW), -1)[:, :columns] - offset).view(torch.int8)


def _integer_args(num_bits: int, *, symmetric: bool) -> dict[str, Any]:
    return {"num_bits": num_bits, "type": "int", "symmetric": symmetric, "dynamic": False}


def _group_size(args: StoredArgs) -> int | None:
    return args.group_size if args.strategy == "group" else None


def _stored_shape(module: str, load: Callable[[str], Tensor]) -> tuple[int, int]:
    shape = load(f"{module}.weight_shape")
    _check(module, shape.shape == (2,) and not shape.is_floating_point(), "weight_shape is no pair of sizes")
    return int(shape[0]), int(shape[1])


def _unpacked(module: str, words_RW: Tensor, *, shape: tuple[int, int], num_bits: int) -> Tensor:
    """The codes [R, C], `shape`."""
    words = -(-shape[1] * num_bits // WORD_BITS)
    fits = words_RW.dtype == torch.int32 and words_RW.shape == (shape[0], words)
    _check(module, fits, f"codes of shape {list(words_RW.shape)} are not {list(shape)} of {num_bits} bits in int32")
    return unpack_columns(words_RW, num_bits, columns=shape[1])


def _check(module: str, holds: bool, otherwise: str) -> None:
    if not holds:
        raise InvalidModel(f"module {module!r}: {otherwise}: {CURE}", field=module)
