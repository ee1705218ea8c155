"""A language model whose next token depends on the last one only: every figure can be worked out on paper."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class BigramModel:
    """Row i of `table_VV` holds the logits after token i. A LanguageModel; `calls` notes the shape of each pass."""

    table_VV: Tensor
    calls: list[tuple[int, ...]]
    runtime: str = "bigrams"

    def logits(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        self.calls.append(tuple(ids_BT.shape))
        return self.table_VV[ids_BT]

    def greedy(self, ids_T: list[int], *, max_new_tokens: int, stop: frozenset[int]) -> list[int]:
        new: list[int] = []
        while len(new) < max_new_tokens and not stop.intersection(new[-1:]):
            new.append(int(self.table_VV[(new or ids_T)[-1]].argmax()))
        return new


def bigrams(*, vocabulary: int, seed: int) -> BigramModel:
    generator = torch.Generator().manual_seed(seed)
    return BigramModel(torch.randn(vocabulary, vocabulary, generator=generator), [])
