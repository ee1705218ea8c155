"""Export a decoder language model to ONNX with a key/value cache: quantized layers on the very codes that were chosen.

open -> parity reference -> torch.onnx -> save -> run in ONNX Runtime

The float layers are in FP32, and so is everything that is computed: also where a base is stored in bfloat16 and its
scales too, each weight is (code - zero point) * scale in FP32, not rounded to bfloat16 once more.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import onnx_ir as ir

from compressors.coded_decoder import QUANTIZATION, CodedDecoder, open_decoder, read_decoder_config
from compressors.decoder_graph import to_onnx
from compressors.decoder_runs import check_runs, write_parity
from compressors.folders import CONFIG, companion_files, left_out_warnings
from compressors.stages import Job, Monitor
from modelpress.errors import InternalError
from modelpress.recipes import Export
from modelpress.reports import StageRecord

VERSION = 1
MODEL_FILE = "model.onnx"
DATA_FILE = "model.onnx.data"
OPERATOR = "MatMulNBits"


def run(arguments: Export, job: Job, monitor: Monitor) -> StageRecord:
    """Write `model.onnx` with its weights in `model.onnx.data`, config.json and every companion file.

    The parity reference goes to `job.evidence`. `kept_float` names the linear layers with float weights.
    """
    decoder = open_decoder(job.model)
    kept_float = decoder.float_linears
    parity_rows = write_parity(decoder, seed=job.seed, folder=job.evidence) if job.evidence is not None else 0
    graph = to_onnx(decoder.with_onnx_products(), decoder.family, opset=arguments.opset)
    operators = _check_products(graph, decoder)
    file = save(graph, job.output)
    write_companions(job.model, job.output)
    shapes = check_runs(file, decoder.model.config)
    return StageRecord(
        method="export",
        arguments=arguments.model_dump(mode="json"),
        version=VERSION,
        touched=(MODEL_FILE, DATA_FILE),
        kept_float=kept_float,
        details={
            "size_bytes": sum((job.output / name).stat().st_size for name in (MODEL_FILE, DATA_FILE)),
            "quantized_operators": {OPERATOR: operators},
            "shapes_run": [list(shape) for shape in shapes],
            "parity_rows": parity_rows,
        },
        warnings=left_out_warnings(job.model),
    )


def save(model: ir.Model, folder: Path) -> Path:
    """Write the graph, and beside it one file with every tensor but the smallest."""
    folder.mkdir(parents=True, exist_ok=True)
    ir.save(model, folder / MODEL_FILE, external_data=DATA_FILE)
    return folder / MODEL_FILE


def write_companions(source: Path, output: Path) -> None:
    """Companion files byte for byte; config.json too, but for a quantization_config: its tensors are not here."""
    config = read_decoder_config(source)
    for name in (CONFIG, *companion_files(source)):
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, output / name)
    if config.pop(QUANTIZATION, None) is not None:
        (output / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_products(model: ir.Model, decoder: CodedDecoder) -> int:
    """The number of MatMulNBits; InternalError unless each quantized layer is one."""
    found = sum(node.op_type == OPERATOR for node in model.graph)
    if found != len(decoder.quantized):
        raise InternalError(f"the exported graph has {found} {OPERATOR} for {len(decoder.quantized)} quantized layers")
    return found
