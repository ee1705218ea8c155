"""Tiny decoders and their exports to ONNX, each made once per process: read only."""

from __future__ import annotations

import atexit
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from compressors import export_decoder_onnx
from compressors.integer_grid import dequantize
from compressors.stages import Job, SilentMonitor
from modelpress.recipes import Export
from modelpress.reports import StageRecord
from tests.compressors.decoders import make_decoder
from tests.compressors.quantized_decoders import QuantizedDecoder

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


def fake_quantized(decoder: QuantizedDecoder) -> Any:
    """The decoder's base in transformers, its quantized layers with the values in FP32 that the codes stand for."""
    model = float_model(base_of(decoder))
    for module, weight in decoder.weights.items():
        model.get_submodule(module).weight.data = dequantize(weight.codes_OI, weight.scales_OG.float(), weight.zeros_OG)
    return model


def base_of(decoder: QuantizedDecoder) -> Path:
    """Where `quantize_decoder` puts the float base."""
    return decoder.folder.with_name(f"{decoder.folder.name}-base")


def scratch() -> Path:
    folder = Path(mkdtemp(prefix="exported-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
