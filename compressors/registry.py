"""The recipe's methods, `export` also by target format, and what runs them. A new compressor is one file and one row
here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from compressors import (
    export_bitsandbytes,
    export_compressed_tensors,
    export_decoder_onnx,
    export_gptq,
    export_onnx,
    merge_lora,
    merge_models,
    prune,
    quantize,
    quantize_weights,
    recover,
)
from compressors.stages import Job, Monitor, StreamJob
from modelpress.reports import StageRecord


class Compressor(NamedTuple):
    """`version` is the stage's VERSION: raised whenever its output may change."""

    run: Callable[[Any, Job, Monitor], StageRecord]
    version: int


class StreamingCompressor(NamedTuple):
    """A compressor that reads and writes the content store itself."""

    run: Callable[[Any, StreamJob, Monitor], StageRecord]
    version: int


COMPRESSORS: Mapping[str, Compressor] = {
    "prune": Compressor(prune.run, prune.VERSION),
    "recover": Compressor(recover.run, recover.VERSION),
    "quantize": Compressor(quantize.run, quantize.VERSION),
    "export": Compressor(export_onnx.run, export_onnx.VERSION),
    "export_decoder_onnx": Compressor(export_decoder_onnx.run, export_decoder_onnx.VERSION),
}

STREAMING: Mapping[str, StreamingCompressor] = {
    "merge_lora": StreamingCompressor(merge_lora.run, merge_lora.VERSION),
    "merge_models": StreamingCompressor(merge_models.run, merge_models.VERSION),
    "quantize_weights": StreamingCompressor(quantize_weights.run, quantize_weights.VERSION),
    "export_compressed_tensors": StreamingCompressor(export_compressed_tensors.run, export_compressed_tensors.VERSION),
    "export_gptq": StreamingCompressor(export_gptq.run, export_gptq.VERSION),
    "export_bitsandbytes": StreamingCompressor(export_bitsandbytes.run, export_bitsandbytes.VERSION),
}
