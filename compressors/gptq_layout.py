"""Integer weights as GPTQ checkpoints hold them: tensors, and the config.

    X.qweight   int32 [I b / 32, O]: codes + 2^(b-1), packed along the inputs, the first in the lowest bits of a word
    X.qzeros    int32 [G, O b / 32]: zero points + 2^(b-1), packed along the outputs; in format `gptq` one less
    X.scales    float16 [G, O]
    X.g_idx     int32 [I]: the group of each input

Layout: AutoGPTQ's, as GPTQModel, vLLM and transformers read it. Format `gptq` (v1) has no code for the zero point 0:
one less than 0 runs into the neighbouring bits, and readers differ in what they make of it. So asymmetric weights are
`gptq_v2`, which stores zero points as they are; symmetric ones, all of zero point 2^(b-1), are `gptq`. Inputs keep
their order (`desc_act` false). Legend: O outputs, I inputs, G groups along I, b bits a code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from compressors.integer_grid import IntegerGrid, QuantizedWeight
from compressors.pack_quantized import WORD_BITS, pack_columns
from modelpress.errors import InvalidModel

METHOD = "gptq"
SCALE_DTYPE = torch.float16
PER_CHANNEL = -1
"""group_size of a scale per output channel."""


def stored_tensors(module: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """What is stored of the linear layer `module` beside its bias, of `stored_shapes`."""
    outputs, inputs = weight.codes_OI.shape
    bits, groups = weight.grid.num_bits, weight.grid.groups(inputs)
    zeros_GW = symmetric_zeros(groups, outputs=outputs, num_bits=bits)
    if weight.zeros_OG is not None:
        zeros_GW = pack_columns(weight.zeros_OG.T.contiguous(), bits)
    return {
        f"{module}.qweight": pack_columns(weight.codes_OI, bits).T.contiguous(),
        f"{module}.qzeros": zeros_GW,
        f"{module}.scales": weight.scales_OG.T.contiguous(),
        f"{module}.g_idx": group_of_inputs(inputs, groups=groups),
    }


def stored_shapes(
    module: str, shape: tuple[int, int], grid: IntegerGrid
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and shape of each stored tensor of a weight of `shape` [O, I].

    InvalidModel where codes or zero points do not fill whole words, or the scales are not float16.
    """
    outputs, inputs = shape
    per_word, groups = WORD_BITS // grid.num_bits, grid.groups(inputs)
    if outputs % per_word or inputs % per_word:
        raise InvalidModel(
            f"module {module!r} has shape [{outputs}, {inputs}], and GPTQ files hold {grid.num_bits}-bit weights with "
            f"both divisible by {per_word}: export as compressed-tensors",
            field=module,
        )
    if grid.scale_dtype != SCALE_DTYPE:
        raise InvalidModel(
            f"module {module!r} has scales in {grid.scale_dtype}, and GPTQ files hold float16: set scale_dtype: "
            "float16 in 'quantize_weights'",
            field=module,
        )
    return {
        f"{module}.qweight": (torch.int32, (inputs // per_word, outputs)),
        f"{module}.qzeros": (torch.int32, (groups, outputs // per_word)),
        f"{module}.scales": (SCALE_DTYPE, (groups, outputs)),
        f"{module}.g_idx": (torch.int32, (inputs,)),
    }


def quantization_config(grid: IntegerGrid, *, ignored: Sequence[str]) -> dict[str, Any]:
    """The config's `quantization_config`, and all of quantize_config.json.

    `ignored` are the linear layers that stay float, the head among them; `dynamic` names those that readers would
    take for quantized, with GPTQModel's and vLLM's sign for a layer to skip.
    """
    return {
        "quant_method": METHOD,
        "bits": grid.num_bits,
        "group_size": grid.group_size or PER_CHANNEL,
        "sym": grid.symmetric,
        "desc_act": False,
        "checkpoint_format": "gptq" if grid.symmetric else "gptq_v2",
        "pack_dtype": "int32",
        "lm_head": False,
        "dynamic": {f"-:^{re.escape(name)}$": {} for name in ignored},
        "meta": {"quantizer": [f"modelpress:{version('modelpress')}"]},
    }


def symmetric_zeros(groups: int, *, outputs: int, num_bits: int) -> Tensor:
    """qzeros in format `gptq` of weights whose zero point is 2^(b-1) everywhere: one less in every field."""
    fields = WORD_BITS // num_bits
    word = sum(((1 << (num_bits - 1)) - 1) << (num_bits * place) for place in range(fields))
    return torch.full((groups, outputs // fields), word, dtype=torch.int32)


def group_of_inputs(inputs: int, *, groups: int) -> Tensor:
    """g_idx: neighbouring inputs share a group."""
    return torch.arange(groups, dtype=torch.int32).repeat_interleave(inputs // groups)
