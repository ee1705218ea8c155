"""Tiny decoders rounded to nearest, in the folder that `quantize_weights` leaves: what the tests of formats share."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compressors import bitsandbytes_layout, pack_quantized
from compressors.codebook_grid import CodebookGrid, CodebookWeight, round_to_codebook
from compressors.integer_grid import IntegerGrid, QuantizedWeight, round_to_nearest
from modelpress.quantization_recipes import QuantizeWeights
from tests.compressors.decoders import make_decoder
from tests.compressors.stored_models import Tensors

AnyWeight = QuantizedWeight | CodebookWeight
HEAD = "lm_head"


@dataclass(frozen=True)
class QuantizedDecoder:
    """`folder` is quantized; `weights` are its linear layers by module; `plain` are the base's tensors."""

    folder: Path
    weights: dict[str, AnyWeight]
    plain: Tensors

    @property
    def dequantized(self) -> Tensors:
        """The base's tensors, with what the quantized layers stand for."""
        values = {f"{module}.weight": weight.dequantized() for module, weight in self.weights.items()}
        return {name: values.get(name, tensor).to(tensor.dtype) for name, tensor in self.plain.items()}


def arguments_of(**fields: Any) -> QuantizeWeights:
    return QuantizeWeights(algorithm="rtn", **fields)


def quantize_decoder(
    folder: Path, arguments: QuantizeWeights, *, dtype: str = "float32", ignored: tuple[str, ...] = (), **config: Any
) -> QuantizedDecoder:
    """A new decoder in `folder`, with all linear layers of its decoder layers quantized except `ignored`."""
    base = make_decoder(folder.with_name(f"{folder.name}-base"), dtype=dtype, **config)
    plain = load_file(base / "model.safetensors")
    names = [name for name in plain if name.endswith("_proj.weight") and name.removesuffix(".weight") not in ignored]
    grid = _grid(arguments, getattr(torch, dtype))
    weights = {name.removesuffix(".weight"): _rounded(plain[name], grid) for name in names}
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    stored = {name: tensor for name, tensor in plain.items() if name not in names}
    for module, weight in weights.items():
        stored |= _stored(module, weight, arguments, getattr(torch, dtype))
    _write(stored, folder)
    value = json.loads((base / "config.json").read_text())
    value["quantization_config"] = _config(arguments, grid, dtype=getattr(torch, dtype), ignored=(HEAD, *ignored))
    (folder / "config.json").write_text(json.dumps(value))
    return QuantizedDecoder(folder, weights, plain)


def _grid(arguments: QuantizeWeights, dtype: torch.dtype) -> IntegerGrid | CodebookGrid:
    if arguments.scheme in ("nf4", "fp4"):
        return CodebookGrid(arguments.scheme, arguments.group_size)
    scales = dtype if arguments.scale_dtype == "stored" else getattr(torch, arguments.scale_dtype)
    return IntegerGrid(arguments.num_bits, arguments.symmetric, arguments.group_size, scales)


def _rounded(w_OI: Tensor, grid: IntegerGrid | CodebookGrid) -> AnyWeight:
    return round_to_nearest(w_OI, grid) if isinstance(grid, IntegerGrid) else round_to_codebook(w_OI, grid)


def _stored(module: str, weight: AnyWeight, arguments: QuantizeWeights, dtype: torch.dtype) -> Tensors:
    if isinstance(weight, QuantizedWeight):
        return pack_quantized.stored_tensors(module, weight, scheme=arguments.scheme)
    return bitsandbytes_layout.stored_tensors(module, weight, dtype=dtype)


def _config(
    arguments: QuantizeWeights, grid: IntegerGrid | CodebookGrid, *, dtype: torch.dtype, ignored: tuple[str, ...]
) -> dict[str, Any]:
    if isinstance(grid, IntegerGrid):
        return pack_quantized.quantization_config(arguments, grid=grid, ignored=ignored)
    return bitsandbytes_layout.quantization_config(arguments, dtype=dtype, ignored=ignored)


def _write(tensors: Tensors, folder: Path) -> None:
    """One file for what is outside the decoder layers, then one for each."""
    parts: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        part = name.split(".")[2] if name.startswith("model.layers.") else "outside"
        parts.setdefault(part, {})[name] = tensor.contiguous()
    weight_map = {}
    for number, part in enumerate(("outside", *sorted(parts.keys() - {"outside"})), 1):
        path = f"model-{number:05}-of-{len(parts):05}.safetensors"
        save_file(parts[part], folder / path, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(parts[part], path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
