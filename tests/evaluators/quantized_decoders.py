"""Tiny decoders in every quantized layout, written without the readers under test, and what their values are.

compressed-tensors by the package's own compressor, GPTQ by a loop over bits, bitsandbytes by its definition.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
NF4_LEVELS = torch.linspace(-1, 1, 16)
"""Any table will do: the layout stores the one it was quantized with."""

Stored = tuple[dict[str, Tensor], Tensor]
"""What is stored beside a module's name, and the values that it stands for."""


def quantize(base: Path, folder: Path, layout: str, *, scale_dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Write `base` in a layout of `LAYOUTS`; the values of its linear layers by tensor name."""
    settings, store = LAYOUTS[layout]
    shutil.copytree(base, folder)
    tensors, values = {}, {}
    for name, tensor in load_file(base / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            module = name.removesuffix(".weight")
            parts, values[name] = store(tensor.float(), scale_dtype)
            tensors |= {f"{module}.{part}": value for part, value in parts.items()}
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    return values


def _codes(w_OI: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes -8 ... 7 and scales [O, G] of one step per group."""
    w_OGK = w_OI.reshape(len(w_OI), -1, GROUP)
    scales_OG = (w_OGK.abs().amax(dim=-1) / 7).to(scale_dtype)
    return (w_OGK / scales_OG.float()[..., None]).round().clamp(-8, 7).reshape(w_OI.shape), scales_OG


def _values(codes_OI: Tensor, scales_OG: Tensor) -> Tensor:
    return codes_OI.to(scales_OG.dtype) * scales_OG.repeat_interleave(codes_OI.shape[1] // scales_OG.shape[1], dim=1)


def _args(bits: int, strategy: str, group_size: int | None = None, *, dynamic: bool = False) -> dict[str, object]:
    fields = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy}
    return {**fields, "group_size": group_size, "dynamic": dynamic}


def compressed_settings(layout: str, weights: Mapping[str, object], activations: object = None) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "format": layout}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def _packed(w_OI: Tensor, scale_dtype: torch.dtype) -> Stored:
    codes_OI, scales_OG = _codes(w_OI, scale_dtype)
    values_OI = _values(codes_OI, scales_OG)
    scheme = QuantizationScheme(targets=["Linear"], weights=_args(4, "group", GROUP))
    state = {"weight": values_OI.float(), "weight_scale": scales_OG.float()}
    stored = BaseCompressor.get_value_from_registry("pack-quantized").compress(state, scheme)
    return {**stored, "weight_scale": scales_OG}, values_OI


def _int8(w_OI: Tensor, scale_dtype: torch.dtype) -> Stored:
    scales_O1 = (w_OI.abs().amax(dim=1, keepdim=True) / 127).to(scale_dtype)
    codes_OI = (w_OI / scales_O1.float()).round().to(torch.int8)
    return {"weight": codes_OI, "weight_scale": scales_O1}, _values(codes_OI, scales_O1)


def _gptq(zero_stored: int) -> Callable[[Tensor, torch.dtype], Stored]:
    def store(w_OI: Tensor, _: torch.dtype) -> Stored:
        codes_OI, scales_OG = _codes(w_OI, torch.float16)
        unsigned_IO = (codes_OI + 8).int().T
        outputs, inputs = w_OI.shape
        qweight = torch.zeros(inputs // 8, outputs, dtype=torch.int64)
        for place in range(8):
            qweight += unsigned_IO[place::8].long() << (4 * place)
        zeros = sum(zero_stored << (4 * place) for place in range(8))
        qzeros = torch.full((inputs // GROUP, outputs // 8), zeros)
        parts = {
            "qweight": (qweight - ((qweight >= 2**31).long() << 32)).int(),
            "qzeros": (qzeros - ((qzeros >= 2**31).long() << 32)).int(),
            "scales": scales_OG.T.contiguous(),
            "g_idx": torch.arange(inputs, dtype=torch.int32) // GROUP,
        }
        return parts, _values(codes_OI, scales_OG)

    return store


def _nf4(w_OI: Tensor, _: torch.dtype) -> Stored:
    blocks_GK = w_OI.reshape(-1, GROUP)
    absmax_G = blocks_GK.abs().amax(dim=1)
    codes = (blocks_GK[..., None] / absmax_G[:, None, None] - NF4_LEVELS).abs().argmin(dim=-1)
    pairs = codes.reshape(-1, 2)
    state = {"quant_type": "nf4", "blocksize": GROUP, "dtype": "float32", "shape": list(w_OI.shape)}
    parts = {
        "weight": (pairs[:, :1] * 16 + pairs[:, 1:]).to(torch.uint8),
        "weight.absmax": absmax_G,
        "weight.quant_map": NF4_LEVELS.clone(),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return parts, (NF4_LEVELS[codes] * absmax_G[:, None]).reshape(w_OI.shape)


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
W8A8 = compressed_settings("int-quantized", _args(8, "channel"), _args(8, "token", dynamic=True))
LAYOUTS: Mapping[str, tuple[Mapping[str, object], Callable[[Tensor, torch.dtype], Stored]]] = {
    "pack-quantized": (compressed_settings("pack-quantized", _args(4, "group", GROUP)), _packed),
    "int-quantized": (compressed_settings("int-quantized", _args(8, "channel")), _int8),
    "w8a8": (W8A8, _int8),
    "gptq": ({**_GPTQ, "checkpoint_format": "gptq"}, _gptq(7)),
    "gptq_v2": ({**_GPTQ, "checkpoint_format": "gptq_v2"}, _gptq(8)),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, _nf4),
}
