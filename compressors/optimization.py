"""The optimizer, its schedule and its precision: what every training stage shares."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from modelpress.recipes import TrainingArguments

MAX_GRADIENT_NORM = 1.0


def learning_rate(step: int, *, steps: int, peak: float, warmup_fraction: float) -> float:
    """Rate of step 0, 1, ..., steps - 1: a linear rise to `peak`, then a half cosine that would reach 0 at `steps`."""
    warmup = math.floor(steps * warmup_fraction)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def autocast(arguments: TrainingArguments, device: str) -> AbstractContextManager[Any]:
    """bfloat16 autocast on CUDA unless the recipe says float32; nothing on the CPU."""
    if device.startswith("cuda") and arguments.mixed_precision != "float32":
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return nullcontext()


def make_optimizer(parameters: Iterable[nn.Parameter], arguments: TrainingArguments) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019) without decay for biases and norms, the parameters of one dimension."""
    trained = list(parameters)
    decayed = [p for p in trained if p.ndim >= 2]
    plain = [p for p in trained if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": arguments.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=arguments.learning_rate, fused=True)
