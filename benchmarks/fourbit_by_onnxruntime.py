"""`python -m benchmarks.fourbit_by_onnxruntime BASE WINDOWS OUTPUT SETTINGS THREADS`: MatMulNBits by ONNX Runtime.

It reads the FP32 graph that lies beside BASE, and no calibration; the head stays float, as everywhere here.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import onnx
from onnxruntime.quantization.matmul_nbits_quantizer import (
    DefaultWeightOnlyQuantConfig,
    HQQWeightOnlyQuantConfig,
    MatMulNBitsQuantizer,
)

from benchmarks.fourbit_bases import GRAPH
from benchmarks.processes import clock, say

MODEL = "model.onnx"
LOGITS = "logits"


def main(base: str, windows: str, output: str, settings: str, threads: str) -> None:
    begun = clock()
    graph, written = Path(base).parent / GRAPH, Path(output)
    shutil.copytree(graph, written, ignore=shutil.ignore_patterns(f"{MODEL}*"))
    model = onnx.load(graph / MODEL)
    heads = [node.name for node in model.graph.node if LOGITS in node.output]
    quantizer = MatMulNBitsQuantizer(model, nodes_to_exclude=heads, algo_config=method(**json.loads(settings)))
    quantizer.process()
    quantizer.model.save_model_to_file(str(written / MODEL), use_external_data_format=True)
    say(begun)


def method(*, algorithm: str, group_size: int) -> Any:
    """`default` is symmetric here; `hqq` is asymmetric always."""
    if algorithm == "hqq":
        return HQQWeightOnlyQuantConfig(block_size=group_size, bits=4)
    return DefaultWeightOnlyQuantConfig(block_size=group_size, is_symmetric=True, bits=4)


if __name__ == "__main__":
    main(*sys.argv[1:])
