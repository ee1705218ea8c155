"""What `quantize_weights` made with an integer scheme, packed anew as a GPTQ checkpoint: the same codes and scales.

One linear layer's codes are in memory at a time. Everything that is not quantized keeps its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from compressors import gptq_layout, pack_quantized
from compressors.export_compressed_tensors import quantized_modules
from compressors.folders import CONFIG
from compressors.gathered_files import GatheredTensor, gather, made_tensor, stored_tensor
from compressors.integer_grid import IntegerGrid
from compressors.stages import Monitor, StreamJob
from compressors.weight_files import WeightFiles, json_bytes, read_json
from modelpress.errors import InvalidModel
from modelpress.recipes import Export
from modelpress.reports import StageRecord

VERSION = 1
QUANTIZE_CONFIG = "quantize_config.json"
PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")


def run(arguments: Export, job: StreamJob, monitor: Monitor) -> StageRecord:
    """InvalidModel where the base is not pack-quantized, or a layer does not fit the format."""
    config = read_json(job.base, CONFIG)
    quantization = config.get("quantization_config") or {}
    layout, args = pack_quantized.layout_of(quantization)
    if layout != "pack-quantized":
        raise InvalidModel(
            f"the base is {layout}, and GPTQ files hold no quantized activations: export as compressed-tensors",
            field="quantization_config",
        )
    grid = IntegerGrid(args.num_bits, args.symmetric, args.group_size, gptq_layout.SCALE_DTYPE)
    written = gptq_layout.quantization_config(grid, ignored=quantization.get("ignore") or ())
    beside = {CONFIG: json_bytes({**config, "quantization_config": written}), QUANTIZE_CONFIG: json_bytes(written)}
    base = WeightFiles.read(job.base)
    base.verify()
    modules = quantized_modules(base)
    tensors = list(_tensors(base, modules, quantization=quantization))
    gathered = gather(base, tensors, job, monitor, beside=beside)
    return gathered.record(arguments, version=VERSION, modules=modules, layout=written["checkpoint_format"])


class _Repacking:
    """One linear layer at a time from one layout to the other; the newest one is kept for its other tensors."""

    def __init__(self, base: WeightFiles, quantization: Mapping[str, Any]) -> None:
        self._base = base
        self._quantization = quantization
        self._newest: dict[str, Tensor] = {}

    def tensor(self, module: str, name: str) -> Tensor:
        if name not in self._newest:
            weight = pack_quantized.read_weight(module, self._base.load, quantization=self._quantization)
            self._newest = gptq_layout.stored_tensors(module, weight)
        return self._newest[name]


def _tensors(
    base: WeightFiles, modules: tuple[str, ...], *, quantization: Mapping[str, Any]
) -> Iterator[GatheredTensor]:
    """Those of the base in their order, each quantized layer's replaced by its new ones."""
    repacking = _Repacking(base, quantization)
    _, args = pack_quantized.layout_of(quantization)
    owners = {f"{module}.{part}": module for module in modules for part in PARTS}
    for name, stored in base.tensors.items():
        module = owners.get(name)
        if module is None:
            yield stored_tensor(base, stored)
        elif name == f"{module}.weight_scale":
            outputs, inputs = base.load(f"{module}.weight_shape").tolist()
            grid = IntegerGrid(args.num_bits, args.symmetric, args.group_size, stored.dtype)
            for new, (dtype, shape) in gptq_layout.stored_shapes(module, (outputs, inputs), grid).items():
                make = partial(repacking.tensor, module, new)
                if new == f"{module}.scales":
                    make = partial(_scales, base, name)
                yield made_tensor(new, make, dtype=dtype, shape=shape)


def _scales(base: WeightFiles, name: str) -> Tensor:
    """GPTQ's scales [G, O] straight from those stored [O, G]: a file holds all layers' scales after all their codes."""
    return base.load(name).T.contiguous()
