"""GPTQ's layout read back: the inverse of `gptq_layout.stored_tensors`.

Shapes: O outputs, I inputs, G groups along I, W words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compressors.integer_grid import IntegerGrid, QuantizedWeight
from compressors.pack_quantized import unpack_columns
from tests.compressors.stored_models import Tensors

PARTS = ("qweight", "qzeros", "scales", "g_idx")


def read_gptq_weight(module: str, tensors: Tensors, *, quantization: Mapping[str, Any]) -> QuantizedWeight:
    """The weight of which `stored_tensors` made these; `quantization` is the config's `quantization_config`."""
    words_WO, zeros_GW, scales_GO, groups_I = (tensors[f"{module}.{part}"] for part in PARTS)
    bits, size, symmetric = (quantization[name] for name in ("bits", "group_size", "sym"))
    grid = IntegerGrid(bits, symmetric, None if size == -1 else size, scales_GO.dtype)
    codes_OI = unpack_columns(words_WO.T, bits, columns=len(groups_I))
    zeros_OG = None if symmetric else unpack_columns(zeros_GW, bits, columns=scales_GO.shape[1]).T.contiguous()
    return QuantizedWeight(grid, codes_OI, scales_GO.T.contiguous(), zeros_OG)
