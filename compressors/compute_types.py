"""The type in which a training step computes its products, by device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def products_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device has units for its products (CUDA; a CPU with AMX), else float32."""
    has_units = device.type == "cuda" or torch.cpu.get_capabilities().get("amx_bf16", False)
    return torch.bfloat16 if has_units else torch.float32


def fastest_products(device: torch.device) -> AbstractContextManager[Any]:
    """Products inside are computed in `products_dtype`; where that is float32 nothing changes."""
    dtype = products_dtype(device)
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)
