"""The values of a model in GPTQ's layout, computed from its files by an own reader: transformers needs a GPU kernel.

A linear layer is four tensors (AutoGPTQ, "checkpoint_format": "gptq" and "gptq_v2"), P codes in each int32, the lowest
bits first:

    qweight [I/P, O]   codes, packed along the inputs
    qzeros  [G, O/P]   zero points, packed along the outputs; stored less one in "gptq"
    scales  [G, O]
    g_idx   [I]        group of each input

Value = (code - zero) * scale, in the scales' dtype. Shapes: O outputs, I inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from evaluators.stored_weights import StoredTensor, Weights
from modelpress.errors import InvalidModel

CODES = ".qweight"
PARTS = (CODES, ".qzeros", ".scales", ".g_idx")
ZERO_OFFSETS: Mapping[str, int] = {"gptq": 1, "gptq_v2": 0}
"""checkpoint_format -> what is added to a stored zero point."""


@dataclass(frozen=True)
class GptqWeights:
    """The stored weights, the quantized ones of them as values in their own shapes."""

    stored: Weights
    num_bits: int
    zero_offset: int

    @classmethod
    def of(cls, stored: Weights) -> GptqWeights:
        """InvalidModel for another number of bits than 4 or 8, or an unknown checkpoint_format."""
        settings = stored.config["quantization_config"]
        bits, layout = settings.get("bits"), settings.get("checkpoint_format", "gptq")
        if bits not in (4, 8) or layout not in ZERO_OFFSETS:
            raise InvalidModel(
                f"config.json: quantization_config has bits {bits!r} and checkpoint_format {str(layout)[:40]!r}: "
                f"4 or 8 bits are read, in {' or '.join(ZERO_OFFSETS)}",
                field="quantization_config",
            )
        return cls(stored, bits, ZERO_OFFSETS[layout])

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """What the model would have if it had not been quantized."""
        plain = {name: tensor for name, tensor in self.stored.tensors.items() if not name.endswith(PARTS)}
        for name, codes in self.stored.tensors.items():
            if name.endswith(CODES):
                module = name.removesuffix(CODES)
                inputs, outputs = codes.shape[0] * (32 // self.num_bits), codes.shape[1]
                scales = self._part(module, ".scales")
                plain[f"{module}.weight"] = replace(scales, shape=(outputs, inputs))
        return plain

    def load(self, name: str) -> Tensor:
        """The tensor on the CPU, in its scales' dtype where it was quantized."""
        module = name.removesuffix(".weight")
        if name == module or module + CODES not in self.stored.tensors:
            return self.stored.load(name)
        codes_IO, zeros_GO, scales_GO, groups_I = (self._loaded(module, part) for part in PARTS)
        zeros_GO = unpack(zeros_GO.T, self.num_bits).T + self.zero_offset
        codes_IO = unpack(codes_IO, self.num_bits)
        if len(groups_I) != len(codes_IO) or zeros_GO.shape != scales_GO.shape or _outside(groups_I, len(scales_GO)):
            raise InvalidModel(f"the parts of {module!r} do not fit together: export the model again", field=module)
        steps_IO = (codes_IO - zeros_GO[groups_I]).to(scales_GO.dtype)
        return (steps_IO * scales_GO[groups_I]).T.contiguous()

    def _part(self, module: str, part: str) -> StoredTensor:
        if module + part not in self.stored.tensors:
            raise InvalidModel(f"{module + CODES!r} has no {part[1:]} beside it: export the model again", field=module)
        return self.stored.tensors[module + part]

    def _loaded(self, module: str, part: str) -> Tensor:
        self._part(module, part)
        return self.stored.load(module + part)


def unpack(packed_NM: Tensor, num_bits: int) -> Tensor:
    """Codes int32 [N * P, M] of int32 [N, M], P = 32 / num_bits: row n holds rows n P ... n P + P - 1, lowest first."""
    shifts_P = torch.arange(0, 32, num_bits, dtype=torch.int32)
    codes_NPM = (packed_NM[:, None, :] >> shifts_P[None, :, None]) & ((1 << num_bits) - 1)
    return codes_NPM.reshape(-1, packed_NM.shape[1])


def _outside(groups_I: Tensor, groups: int) -> bool:
    return bool((groups_I < 0).any() or (groups_I >= groups).any())
