"""What a quantized decoder's weights will take, from shapes alone: known before anything runs. Free of torch.

    predicted_weight_bytes(shapes, dtypes, stage=recipe.quantize_weights, family=DECODERS["llama"])

The tensors of the output are listed as `pack_quantized` and `bitsandbytes_layout` store them, and their header is the
one that safetensors writes. Legend: O outputs, I inputs, G groups along I.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

from compressors.decoder_families import DecoderFamily
from compressors.decoder_targets import choose_targets, fits
from modelpress.quantization_recipes import CODEBOOKS, QuantizeWeights
from modelpress.safetensors_header import DTYPE_BITS

Stored = tuple[str, tuple[int, ...]]
"""dtype, as safetensors names it, and shape."""
STATE_BYTES = 80
"""Of a quant_state in JSON; a few more or fewer with the digits of the shape."""
SCALE_DTYPES: Mapping[str, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def predicted_weight_bytes(
    shapes: Mapping[str, Sequence[int]], dtypes: Mapping[str, str], *, stage: QuantizeWeights, family: DecoderFamily
) -> int:
    """Bytes of the safetensors file with the quantized weights and everything that stays, within 1 %.

    `shapes` and `dtypes` are those of the base's tensors by name. InvalidRecipe as `choose_targets` raises it.
    """
    modules = choose_targets(stage, family, layers=layer_count(shapes, family)).quantized
    weights = {f"{module}.weight": module for module in modules}
    tensors: dict[str, Stored] = {}
    for name, shape in shapes.items():
        if name in weights and fits(shape, stage):
            tensors |= quantized_tensors(weights[name], shape, dtype=dtypes[name], stage=stage)
        else:
            tensors[name] = (dtypes[name], tuple(shape))
    return _file_bytes(tensors)


def quantized_tensors(module: str, shape: Sequence[int], *, dtype: str, stage: QuantizeWeights) -> Mapping[str, Stored]:
    """What is stored of a linear layer's weight of this `shape` [O, I] and `dtype`."""
    outputs, inputs = shape
    groups = inputs // (stage.group_size or inputs)
    if stage.scheme in CODEBOOKS:
        name = f"{module}.weight"
        return {
            name: ("U8", (outputs * inputs // 2, 1)),
            f"{name}.absmax": ("F32", (outputs * groups,)),
            f"{name}.quant_map": ("F32", (16,)),
            f"{name}.quant_state.bitsandbytes__{stage.scheme}": ("U8", (STATE_BYTES,)),
        }
    scales = {f"{module}.weight_scale": (SCALE_DTYPES.get(stage.scale_dtype, dtype), (outputs, groups))}
    if stage.scheme == "w8a8":
        return {f"{module}.weight": ("I8", (outputs, inputs)), **scales}
    per_word = 32 // stage.num_bits
    zeros = {f"{module}.weight_zero_point": ("I32", (math.ceil(outputs / per_word), groups))}
    return {
        f"{module}.weight_packed": ("I32", (outputs, math.ceil(inputs / per_word))),
        f"{module}.weight_shape": ("I64", (2,)),
        **scales,
        **({} if stage.symmetric else zeros),
    }


def stored_bytes(tensors: Mapping[str, Stored]) -> int:
    """Without a header."""
    return sum(math.prod(shape) * DTYPE_BITS[dtype] // 8 for dtype, shape in tensors.values())


def layer_count(names: Mapping[str, object], family: DecoderFamily) -> int:
    """Decoder layers of which tensors are there."""
    prefix = f"{family.layers}."
    numbers = (name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix))
    return len({number for number in numbers if number.isdecimal()})


def _file_bytes(tensors: Mapping[str, Stored]) -> int:
    offset, entries = 0, {"__metadata__": {"format": "pt"}}
    for name, stored in tensors.items():
        end = offset + stored_bytes({name: stored})
        entries[name] = {"dtype": stored[0], "shape": stored[1], "data_offsets": [offset, end]}  # type: ignore[dict-item]
        offset = end
    return 8 + len(json.dumps(entries, separators=(",", ":"))) + offset
