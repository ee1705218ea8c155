"""The second moment of a linear layer's inputs, H = X^T X / N: the Hessian of its squared output error.

Shapes: N tokens, I inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressors.gptq import blocks

_TILE = 192
"""Rows of H in one product: only the tiles on and right of the diagonal are computed."""


class HessianSum:
    """H summed over the tokens as they come, in float32."""

    def __init__(self, inputs: int, *, device: torch.device) -> None:
        self._upper_II = torch.zeros(inputs, inputs, device=device)
        self.tokens = 0

    def add(self, inputs_NI: Tensor) -> None:
        x_NI = inputs_NI.float()
        for start, stop in blocks(x_NI.shape[1], size=_TILE):
            self._upper_II[start:stop, start:].addmm_(x_NI[:, start:stop].t(), x_NI[:, start:])
        self.tokens += len(x_NI)

    def mean(self) -> Tensor:
        """H [I, I], symmetric; of no tokens 0."""
        upper_II = self._upper_II.triu()
        return (upper_II + upper_II.triu(1).t()) / max(1, self.tokens)
