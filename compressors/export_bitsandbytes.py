"""What `quantize_weights` made with NF4 or FP4, as one folder in bitsandbytes' layout.

The tensors are those of the stage, byte for byte, gathered into few files; config, tokenizer and companions are kept.
"""

from __future__ import annotations

from compressors.bitsandbytes_base import quantized_weights
from compressors.bitsandbytes_layout import scheme_of
from compressors.folders import CONFIG
from compressors.gathered_files import gather, stored_tensor
from compressors.stages import Monitor, StreamJob
from compressors.weight_files import WeightFiles, read_json
from modelpress.recipes import Export
from modelpress.reports import StageRecord

VERSION = 1


def run(arguments: Export, job: StreamJob, monitor: Monitor) -> StageRecord:
    """InvalidModel where the base is not quantized in this layout, or a weight lacks its quant_state or absmax."""
    scheme = scheme_of(read_json(job.base, CONFIG).get("quantization_config") or {})
    base = WeightFiles.read(job.base)
    modules = [name.removesuffix(".weight") for name in quantized_weights(base.tensors)]
    base.verify()
    gathered = gather(base, [stored_tensor(base, tensor) for tensor in base.tensors.values()], job, monitor)
    return gathered.record(arguments, version=VERSION, modules=modules, layout=scheme)
