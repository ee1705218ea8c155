"""The type in which products are computed where bfloat16's eight bits are enough: training steps, calibration passes.

Sums are float32 everywhere, and so is what is not a product: norms, the residual stream, the grids.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_CPU_MATMUL: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def products_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device has units for its products (CUDA; a CPU with AMX), else float32."""
    has_units = device.type == "cuda" or torch.cpu.get_capabilities().get("amx_bf16", False)
    return torch.bfloat16 if has_units else torch.float32


@contextmanager
def fastest_products(device: torch.device) -> Iterator[None]:
    """Products inside are computed in `products_dtype`; where that is float32 nothing changes.

    On a CPU this holds also for float32 tensors that autocast leaves alone, as the sum of x x^T that a hook adds up:
    they are read as bfloat16, and what comes out is float32.
    """
    dtype = products_dtype(device)
    if dtype == torch.float32:
        yield
        return
    before = _CPU_MATMUL.fp32_precision
    if device.type == "cpu":
        _CPU_MATMUL.fp32_precision = "bf16"
    try:
        with torch.autocast(device.type, dtype=dtype):
            yield
    finally:
        _CPU_MATMUL.fp32_precision = before
