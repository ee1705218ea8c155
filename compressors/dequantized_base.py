"""A quantized base seen as the full-precision model that its codes stand for: shapes, dtypes and values.

The files stay as they are stored. Where a merge is asked to, it is done on these values, and the output is no longer
quantized. Formats: bitsandbytes' 4-bit and 8-bit weights (`bitsandbytes_base`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from compressors.bitsandbytes_base import Dequantized, dequantize, quantized_weights, read_quantized
from compressors.changes import Unchanged
from compressors.output_plan import OutputFile, OutputPlan, OutputTensor
from compressors.weight_files import StoredTensor, WeightFile, WeightFiles
from modelpress.errors import InvalidModel
from modelpress.merge_recipes import MergeLora
from modelpress.stored_folders import Source


@dataclass(frozen=True)
class DequantizedBase:
    """`weights` by name. `dtype` is what int8 weights become, which do not say it themselves."""

    stored: WeightFiles
    weights: Mapping[str, Dequantized]
    dtype: torch.dtype

    @property
    def source(self) -> Source:
        return self.stored.source

    @property
    def index(self) -> str | None:
        return self.stored.index

    @cached_property
    def files(self) -> tuple[WeightFile, ...]:
        """The same files without the tensors that only quantized weights have, every weight in its own shape."""
        helpers = {name for weight in self.weights.values() for name in weight.quantized.helpers}
        return tuple(
            replace(file, tensors=tuple(self._logical(t) for t in file.tensors if t.name not in helpers))
            for file in self.stored.files
        )

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        return {tensor.name: tensor for file in self.files for tensor in file.tensors}

    def load(self, name: str) -> Tensor:
        """The values: FP32 where they are dequantized."""
        weight = self.weights.get(name)
        return self.stored.load(name) if weight is None else self._decode(weight, self.stored.load(name))

    def decoded(self, plan: OutputPlan) -> OutputPlan:
        """The plan with every quantized weight made from its codes."""
        origins = {file.path: file for file in self.stored.files}
        return OutputPlan(
            tuple(OutputFile(origins[file.path], tuple(map(self._made, file.tensors))) for file in plan.files)
        )

    def _made(self, tensor: OutputTensor) -> OutputTensor:
        stored = tensor.stored
        if stored is None or stored.name not in self.weights:
            return tensor
        codes, decode = self.stored.tensors[stored.name], partial(self._decode, self.weights[stored.name])
        return replace(tensor, stored=codes, change=tensor.change or Unchanged(), decode=decode)

    def _logical(self, stored: StoredTensor) -> StoredTensor:
        weight = self.weights.get(stored.name)
        return stored if weight is None else replace(stored, shape=weight.shape, dtype=weight.dtype or self.dtype)

    def _decode(self, weight: Dequantized, codes: Tensor) -> Tensor:
        names = weight.quantized.parts
        others = {part: self.stored.load(name) for part, name in names.items() if part != "weight"}
        return dequantize(weight, {"weight": codes, **others})


def open_base(files: WeightFiles, config: Mapping[str, Any], arguments: MergeLora) -> WeightFiles | DequantizedBase:
    """The base as it is merged into. InvalidModel for a quantized one, unless the stage says `dequantize_base`."""
    method = (config.get("quantization_config") or {}).get("quant_method")
    if not config.get("quantization_config"):
        if arguments.dequantize_base:
            raise InvalidModel("dequantize_base is set, and the base is not quantized: leave it out", field="base")
        return files
    if not arguments.dequantize_base:
        raise InvalidModel(
            f"the base is quantized ({method}), and a merge into it would be rounded to its grid: name the "
            "full-precision base, or set the stage's dequantize_base to true",
            reason="QUANTIZED_BASE",
            field="quantization_config",
        )
    if method != "bitsandbytes":
        raise InvalidModel(
            f"the base is quantized by {method!r}, and only bitsandbytes is dequantized: name the full-precision base",
            reason="QUANTIZED_BASE",
            field="quantization_config",
        )
    files.verify()  # scales are read out of the files' order, before a stream has verified them
    weights = {name: read_quantized(weight, files.load) for name, weight in quantized_weights(files.tensors).items()}
    return DequantizedBase(files, weights, _dtype_of(config))


def _dtype_of(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype that the config gives the model; half precision where it gives none, as bitsandbytes has it."""
    name = config.get("dtype") or config.get("torch_dtype")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(str(name), torch.float16)
