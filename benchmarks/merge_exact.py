"""Merged tensors beside their definition: W + scaling * B @ A in FP32, the whole tensor at once, rounded once.

Tensors are read one at a time, from folders in the format of safetensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from benchmarks.merge_models import SCALING, lora_name


@dataclass(frozen=True)
class Difference:
    """Values of adapted tensors whose bits are not those of the definition, and other tensors that changed."""

    elements: int
    tensors: int


class Weights:
    """The tensors of every safetensors file in a folder, by name."""

    def __init__(self, folder: Path) -> None:
        files: list[Any] = [safe_open(file, framework="pt") for file in folder.glob("*.safetensors")]
        self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - it is no mapping

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def load(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


def compare(base: Weights, adapter: Weights, merged: Weights, names: Iterable[str]) -> Difference:
    """How `merged` differs, over the base's tensors of these names."""
    elements = tensors = 0
    for name in names:
        before, after = base.load(name), merged.load(name)
        module = name.removesuffix(".weight")
        if lora_name(module, "A") in adapter:
            a_RI, b_OR = (adapter.load(lora_name(module, factor)) for factor in "AB")
            elements += count_unequal(folded(before, a_RI, b_OR), after)
        else:
            tensors += count_unequal(before, after) > 0
    return Difference(elements, tensors)


def folded(w_OI: Tensor, a_RI: Tensor, b_OR: Tensor) -> Tensor:
    """The merged weight: Hu et al. 2021, in FP32 with one rounding to the dtype of W."""
    return (w_OI.float() + SCALING * (b_OR.float() @ a_RI.float())).to(w_OI.dtype)


def count_unequal(left: Tensor, right: Tensor) -> int:
    """Values of two bfloat16 tensors of one shape that differ in a bit; all of them where shape or dtype differ."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return left.numel()
    return int((left.view(torch.int16) != right.view(torch.int16)).sum())
