"""The values of a model that bitsandbytes quantized, computed from its files: nothing repacks a weight.

4 bits: value i is quant_map[code i] * absmax[i // blocksize], two codes in a byte, the high nibble first; absmax may be
quantized itself (Dettmers et al. 2023). 8 bits: row o is its codes * SCB[o] / 127 (Dettmers et al. 2022).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from evaluators.stored_weights import NotComparable, StoredTensor, Weights

STATE = re.compile(r"(?P<weight>.+)\.quant_state\.bitsandbytes__(nf4|fp4)")
SCALES = ".SCB"


@dataclass(frozen=True)
class DequantizedWeights:
    """The stored weights, the quantized ones of them in FP32 and in their own shapes."""

    stored: Weights

    @classmethod
    def of(cls, stored: Weights) -> DequantizedWeights:
        """NotComparable for other formats than bitsandbytes'."""
        method = stored.config["quantization_config"].get("quant_method")
        if method != "bitsandbytes":
            raise NotComparable(f"the base is quantized by {str(method)[:40]!r}, whose values are not computed here")
        return cls(stored)

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """What the model would have if it had not been quantized."""
        helpers = tuple(f"{name}." for name in self._states)
        plain = {
            name: tensor
            for name, tensor in self.stored.tensors.items()
            if not name.startswith(helpers) and not name.endswith((SCALES, ".weight_format"))
        }
        shapes = {name: tuple(state["shape"]) for name, state in self._states.items()}
        return plain | {name: replace(plain[name], dtype="F32", shape=shape) for name, shape in shapes.items()}

    def load(self, name: str) -> Tensor:
        """The tensor on the CPU, FP32 where it was quantized."""
        if name in self._states:
            return self._four_bits(name, self._states[name])
        scales = name.removesuffix(".weight") + SCALES
        if scales in self.stored.tensors:
            return self.stored.load(name).float() * (self.stored.load(scales).float() / 127)[:, None]
        return self.stored.load(name)

    def _four_bits(self, name: str, state: Mapping[str, Any]) -> Tensor:
        packed = self.stored.load(name).view(torch.uint8).flatten()
        codes = torch.stack([packed >> 4, packed & 15], dim=1).flatten()
        values = self.stored.load(f"{name}.quant_map")[codes.int()]
        scales = self._absmax(name, state).repeat_interleave(state["blocksize"])
        return (values * scales[: len(values)])[: torch.Size(state["shape"]).numel()].view(state["shape"])

    def _absmax(self, name: str, state: Mapping[str, Any]) -> Tensor:
        stored = self.stored.load(f"{name}.absmax")
        if stored.dtype != torch.uint8:
            return stored.float()
        scales = self.stored.load(f"{name}.nested_absmax").repeat_interleave(state["nested_blocksize"])
        codes = self.stored.load(f"{name}.nested_quant_map")[stored.int()]
        return codes * scales[: len(codes)] + float(state["nested_offset"])

    @cached_property
    def _states(self) -> dict[str, dict[str, Any]]:
        """4-bit weights by name: blocksize, shape and how absmax is stored."""
        found = ((name, STATE.fullmatch(name)) for name in self.stored.tensors)
        return {match["weight"]: json.loads(bytes(self.stored.load(name).tolist())) for name, match in found if match}
