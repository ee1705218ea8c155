"""4-bit weights as bitsandbytes stores them, through transformers' `save_pretrained`: tensors, and the config's part.

    X.weight                              uint8 [n / 2, 1]: two codes a byte, the first in the high half
    X.weight.absmax                       float32, one scale per block of the flattened weight
    X.weight.quant_map                    float32 [16], the table
    X.weight.quant_state.bitsandbytes__nf4    uint8, JSON: quant_type, blocksize, dtype, shape (or `__fp4`)

Layout: bitsandbytes 0.50, `QuantState.as_dict(packed=True)`; scales are stored as they are, without the double
quantization of Dettmers et al. 2023. Shapes: O outputs, I inputs, G groups along I; n = O * I.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor

from compressors.bitsandbytes_base import PLAIN, STATES, NestedState, quantized_weights, read_quantized
from compressors.bitsandbytes_codes import CODES
from compressors.codebook_grid import CodebookGrid, CodebookWeight
from modelpress.errors import InvalidModel
from modelpress.quantization_recipes import QuantizeWeights

METHOD = "bitsandbytes"
CURE = "quantize the full-precision base again"
STATE_OF: Mapping[str, str] = {scheme: state for state, scheme in STATES.items()}
"""Scheme -> the last part of the state's name."""


def stored_tensors(module: str, weight: CodebookWeight, *, dtype: torch.dtype) -> dict[str, Tensor]:
    """What is stored of the linear layer `module`; `dtype` is that of the weight before it was quantized."""
    grid, name = weight.grid, f"{module}.weight"
    state = {
        "quant_type": grid.name,
        "blocksize": grid.group_size,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(weight.codes_OI.shape),
    }
    return {
        name: pack_pairs(weight.codes_OI),
        f"{name}.absmax": weight.absmax_OG.float().reshape(-1),
        f"{name}.quant_map": grid.table,
        f"{name}.{STATE_OF[grid.name]}": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def read_weight(module: str, load: Callable[[str], Tensor], *, quantization: Mapping[str, Any]) -> CodebookWeight:
    """The weight of which `stored_tensors` made these; `quantization` is the config's `quantization_config`.

    `load` gives a stored tensor by name, KeyError where there is none. InvalidModel where what is stored is not of
    this layout, e.g. where a weight has lost its quant_state and absmax.
    """
    scheme, name = scheme_of(quantization), f"{module}.weight"
    tensors = _loaded((name, *(f"{name}.{part}" for part in (*PLAIN, STATE_OF[scheme]))), load)
    quantized = quantized_weights(tensors).get(name)
    found = None if quantized is None else read_quantized(quantized, tensors.__getitem__)
    if found is None or found.state is None or isinstance(found.state, NestedState) or len(found.shape) != 2:
        raise InvalidModel(f"tensor {name!r} is no 4-bit matrix with plain scales: {CURE}", field=name)
    outputs, inputs = found.shape
    grid = CodebookGrid(scheme, found.state.blocksize)
    if not grid.fits(inputs):
        raise InvalidModel(f"tensor {name!r} has blocks of {grid.group_size} in rows of {inputs}: {CURE}", field=name)
    absmax_OG = tensors[f"{name}.absmax"].float().reshape(outputs, -1)
    return CodebookWeight(grid, unpack_pairs(tensors[name], (outputs, inputs)), absmax_OG)


def quantization_config(arguments: QuantizeWeights, *, dtype: torch.dtype, ignored: Sequence[str]) -> dict[str, Any]:
    """The config's `quantization_config`, every field of transformers' BitsAndBytesConfig.

    `ignored` are all linear layers that stay float, the head among them; `dtype` is what the layers compute in.
    """
    return {
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": arguments.scheme,
        "bnb_4bit_use_double_quant": False,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": list(ignored),
        "llm_int8_threshold": 6.0,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "quant_method": METHOD,
    }


def scheme_of(quantization: Mapping[str, Any]) -> Literal["nf4", "fp4"]:
    """Which table the config names; InvalidModel where it is not one of 4-bit weights of bitsandbytes."""
    scheme = quantization.get("bnb_4bit_quant_type")
    if quantization.get("quant_method") != METHOD or not quantization.get("load_in_4bit") or scheme not in CODES:
        raise InvalidModel(
            f"quantization_config names {quantization.get('quant_method')!r} with {scheme!r}, expected bitsandbytes' "
            f"nf4 or fp4: {CURE}",
            field="quantization_config",
        )
    return "nf4" if scheme == "nf4" else "fp4"


def pack_pairs(codes_OI: Tensor) -> Tensor:
    """Two codes a byte, the first in the high half, uint8 [n / 2, 1].

    For codes 0 to 15 of an even number unpack_pairs(pack_pairs(codes), codes.shape) == codes.
    """
    pairs = codes_OI.reshape(-1, 2)
    return (pairs[:, :1] << 4) | pairs[:, 1:]


def unpack_pairs(packed: Tensor, shape: tuple[int, int]) -> Tensor:
    """The codes, uint8 [O, I]."""
    return torch.cat((packed.reshape(-1, 1) >> 4, packed.reshape(-1, 1) & 15), dim=1).reshape(shape)


def _loaded(names: Sequence[str], load: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Those of the tensors that there are."""
    tensors = {}
    for name in names:
        with suppress(KeyError):
            tensors[name] = load(name)
    return tensors
