"""Embedding tables as INT8 codes with one scale per row, so that a lookup dequantizes only the rows that it reads.

Shapes: V rows of the table, H hidden width.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modelpress.errors import InvalidModel

CODE_MAX = 127
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class RowCodes:
    """`codes` int8 [V, H] in [-127, 127]; `scales` FP32 [V], above 0."""

    codes: Tensor
    scales: Tensor

    def dequantize(self) -> Tensor:
        """FP32 [V, H]: what a lookup in the exported graph gives, bit for bit."""
        return self.codes.to(torch.float32) * self.scales[:, None]


def quantize_rows(table_VH: Tensor) -> RowCodes:
    """Round to nearest on a symmetric grid per row; a row of zeros stays exactly 0.

    No element moves by more than half of its row's scale.
    """
    if not torch.isfinite(table_VH).all():
        raise InvalidModel("an embedding table holds NaN or infinite values", reason="NON_FINITE")
    scales_V = (table_VH.abs().amax(dim=1) / CODE_MAX).clamp(min=SMALLEST_SCALE)
    codes_VH = torch.round(table_VH / scales_V[:, None]).clamp(-CODE_MAX, CODE_MAX)
    return RowCodes(codes_VH.to(torch.int8), scales_V)


@torch.no_grad()
def snap_tables(model: Any, modules: Iterable[str]) -> dict[str, RowCodes]:
    """Put the tables of these embedding modules on their grid, and freeze them there; codes by module path."""
    found = {}
    for name in modules:
        weight = model.get_submodule(name).weight
        found[name] = quantize_rows(weight.detach())
        weight.copy_(found[name].dequantize())
        weight.requires_grad_(False)
    return found
