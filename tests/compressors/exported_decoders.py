"""Tiny decoders, float or quantized by rounding, and their exports to ONNX: each made once per process, read only."""

from __future__ import annotations

import atexit
import json
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from compressors import export_decoder_onnx, pack_quantized
from compressors.decoder_families import DECODERS
from compressors.integer_grid import IntegerGrid, QuantizedWeight, dequantize, round_to_nearest
from compressors.stages import Job, SilentMonitor
from modelpress.quantization_recipes import QuantizeWeights
from modelpress.recipes import Export
from modelpress.reports import StageRecord
from tests.compressors.decoders import make_decoder

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8, "num_hidden_layers": 1},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": {"tie": False, "num_hidden_layers": 1},
}
"""Family -> fields of its config: windows that the tests' texts are longer than, and a head of its own."""


@dataclass(frozen=True)
class Exported:
    source: Path
    folder: Path
    evidence: Path
    record: StageRecord


def export(source: Path, root: Path) -> Exported:
    job = Job(model=source, output=root / "exported", seed=3, evidence=root / "evidence")
    record = export_decoder_onnx.run(Export(), job, SilentMonitor())
    return Exported(source, root / "exported", root / "evidence", record)


@cache
def exported_family(model_type: str) -> Exported:
    root = scratch()
    return export(make_decoder(root / "model", model_type=model_type, **FAMILIES[model_type]), root)


def float_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def quantize(base: Path, folder: Path, arguments: QuantizeWeights) -> Path:
    """The base with each linear layer of its decoder layers rounded to nearest, as compressed-tensors stores it."""
    grid = IntegerGrid(
        arguments.num_bits, arguments.symmetric, arguments.group_size, getattr(torch, arguments.scale_dtype)
    )
    tensors = load_file(base / "model.safetensors")
    for module in linears(base):
        weight = round_to_nearest(tensors.pop(f"{module}.weight"), grid)
        tensors |= pack_quantized.stored_tensors(module, weight, scheme=arguments.scheme)
    shutil.copytree(base, folder)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = pack_quantized.quantization_config(arguments, grid=grid, ignored=["lm_head"])
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def fake_quantized(base: Path, folder: Path) -> Any:
    """The base in transformers, its quantized layers with the values in FP32 of the codes stored in `folder`."""
    model, tensors = float_model(base), load_file(folder / "model.safetensors")
    quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
    for module in linears(base):
        weight = pack_quantized.read_weight(module, tensors.__getitem__, quantization=quantization)
        model.get_submodule(module).weight.data = values(weight)
    return model


def values(weight: QuantizedWeight) -> torch.Tensor:
    return dequantize(weight.codes_OI, weight.scales_OG.float(), weight.zeros_OG)


def linears(base: Path) -> tuple[str, ...]:
    config = json.loads((base / "config.json").read_text())
    family = DECODERS[config["model_type"]]
    layers = range(config["num_hidden_layers"])
    return tuple(f"{family.layer(number)}.{linear}" for number in layers for linear in family.linears)


def scratch() -> Path:
    folder = Path(mkdtemp(prefix="exported-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
