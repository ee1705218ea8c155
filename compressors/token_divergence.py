"""The Kullback-Leibler divergence of next-token distributions, over large vocabularies.

Shapes: N tokens, V vocabulary, R tokens that are looked at together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROWS = 64
"""Distributions in memory at a time, beside the logits and their gradient."""


def mean_divergence(wanted_NV: Tensor, found_NV: Tensor) -> Tensor:
    """KL(wanted || found) of the distributions that these logits stand for, mean over the tokens, in nats.

    Gradients go to `found_NV` only.
    """
    divergence: Tensor = _MeanDivergence.apply(wanted_NV, found_NV)  # type: ignore[no-untyped-call]
    return divergence


class _MeanDivergence(torch.autograd.Function):
    """The gradient by the found logits, (softmax(found) - softmax(wanted)) / N, is computed beside the value."""

    @staticmethod
    def forward(ctx: Any, wanted_NV: Tensor, found_NV: Tensor) -> Tensor:
        gradient_NV = torch.empty_like(found_NV)
        total = torch.zeros((), dtype=torch.float32, device=found_NV.device)
        chunks = (torch.split(tensor, ROWS) for tensor in (wanted_NV, found_NV, gradient_NV))
        for wanted_RV, found_RV, gradient_RV in zip(*chunks, strict=True):
            wanted_log_RV = wanted_RV.float().log_softmax(dim=-1)
            found_log_RV = found_RV.float().log_softmax(dim=-1)
            wanted_p_RV = wanted_log_RV.exp()
            total += wanted_p_RV.mul(wanted_log_RV.sub_(found_log_RV)).sum()
            gradient_RV.copy_(found_log_RV.exp_().sub_(wanted_p_RV).div_(len(found_NV)))
        ctx.save_for_backward(gradient_NV)
        return total / len(found_NV)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, Tensor]:
        (gradient_NV,) = ctx.saved_tensors
        return None, gradient_NV * gradients[0].to(gradient_NV.dtype)
