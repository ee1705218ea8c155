"""The type in which a training step computes its products, by device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def fastest_products(device: torch.device) -> AbstractContextManager[Any]:
    """bfloat16 products where the device has units for them (CUDA; a CPU with AMX); else float32, nothing changes."""
    has_units = device.type == "cuda" or torch.cpu.get_capabilities().get("amx_bf16", False)
    return torch.autocast(device.type, dtype=torch.bfloat16) if has_units else nullcontext()
