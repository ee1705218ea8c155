"""What `quantize_weights` made with an integer scheme, as one folder in compressed-tensors' layout.

The tensors are those of the stage, byte for byte, gathered into few files; config, tokenizer and companions are kept.
"""

from __future__ import annotations

from compressors.folders import CONFIG
from compressors.gathered_files import gather, stored_tensor
from compressors.pack_quantized import SCALE, layout_of
from compressors.stages import Monitor, StreamJob
from compressors.weight_files import WeightFiles, read_json
from modelpress.recipes import Export
from modelpress.reports import StageRecord

VERSION = 1
ASYMMETRIC = (
    "transformers loads asymmetric weights of compressed-tensors only with "
    "quantization_config=CompressedTensorsConfig(dequantize=True); vLLM reads them as they are"
)
"""Of transformers 5.24 with compressed-tensors 0.20: it expects zero points that are not packed."""


def run(arguments: Export, job: StreamJob, monitor: Monitor) -> StageRecord:
    """InvalidModel where the base is not quantized in this layout."""
    layout, args = layout_of(read_json(job.base, CONFIG).get("quantization_config") or {})
    base = WeightFiles.read(job.base)
    base.verify()
    gathered = gather(base, [stored_tensor(base, tensor) for tensor in base.tensors.values()], job, monitor)
    record = gathered.record(arguments, version=VERSION, modules=quantized_modules(base), layout=layout)
    return record if args.symmetric else record.model_copy(update={"warnings": (*record.warnings, ASYMMETRIC)})


def quantized_modules(base: WeightFiles) -> tuple[str, ...]:
    """The quantized linear layers, in the order of their tensors."""
    return tuple(name.removesuffix(SCALE) for name in base.tensors if name.endswith(SCALE))
