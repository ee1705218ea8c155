"""Several adapters on one tensor made into one change, under the names of PEFT's combination types.

`cat` is the weighted sum itself. `linear` is PEFT's: the factors are summed before they are multiplied. `svd` cuts the
weighted sum to a rank (Eckart and Young 1936). TIES and DARE work on the changes themselves, as their papers do, where
PEFT applies them to the factors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compressors.changes import Change, Rows, wide
from compressors.edits import Edit, LowRank, RowsOf, TransposedLowRank, Weighted, WeightedSum, delta_rows, summed
from compressors.streaming import row_blocks
from compressors.task_vectors import Combination, combine, mask_seed
from modelpress.errors import InvalidModel
from modelpress.merge_recipes import MergeLora


@dataclass(frozen=True)
class NamedEdit:
    """What one adapter does to the tensor."""

    adapter: str
    edit: Edit
    weight: float


def combined(tensor: str, edits: Sequence[NamedEdit], arguments: MergeLora, *, seed: int) -> Change:
    """The change of one tensor by every adapter that has an edit of it."""
    weighted = [(named.edit, named.weight) for named in edits]
    match arguments.combination_type:
        case "cat":
            return WeightedSum(weighted)
        case "linear":
            return WeightedSum([(_linear(tensor, edits), 1.0)]) if _all_low_rank(edits) else WeightedSum(weighted)
        case "svd":
            return CutToRank(WeightedSum(weighted), arguments.svd_rank or 1)
        case method:
            seeds = tuple(mask_seed(seed, name=named.adapter, tensor=tensor) for named in edits)
            settings = Combination(method, arguments.density or 1.0, arguments.majority_sign_method)
            return Combined(weighted, settings, seeds)


@dataclass(frozen=True)
class Combined:
    """base + the task vectors combined: the tensor and every vector are in memory as a whole."""

    edits: Weighted
    combination: Combination
    seeds: Sequence[int]

    def begin(self, stored: Tensor) -> Rows:
        vectors = [whole(delta_rows(edit, stored), stored) for edit, _ in self.edits]
        vector = combine(vectors, [weight for _, weight in self.edits], self.combination, seeds=self.seeds)
        return lambda start, stop: wide(stored[start:stop]) - (0.0 - vector[start:stop])


@dataclass(frozen=True)
class CutToRank:
    """base + the best approximation of the summed change by a matrix of that rank."""

    full: WeightedSum
    rank: int

    def begin(self, stored: Tensor) -> Rows:
        parts = [(delta_rows(edit, stored), weight) for edit, weight in self.full.edits]
        delta = summed([whole(part, stored).mul_(weight) for part, weight in parts])
        if delta.ndim > 1:
            u, s, vh = torch.linalg.svd(delta.flatten(1), full_matrices=False)
            delta = ((u[:, : self.rank] * s[: self.rank]) @ vh[: self.rank]).reshape(delta.shape)
        return lambda start, stop: wide(stored[start:stop]) + delta[start:stop]


def whole(rows: RowsOf, stored: Tensor) -> Tensor:
    """Every row of a change, in one contiguous tensor."""
    result = torch.empty(stored.shape, dtype=wide(stored[:0]).dtype)
    for start, stop in row_blocks(tuple(stored.shape)):
        result[start:stop] = rows(start, stop, wide(stored[start:stop]))
    return result


def _all_low_rank(edits: Sequence[NamedEdit]) -> bool:
    return all(isinstance(named.edit, LowRank) for named in edits)


def _linear(tensor: str, edits: Sequence[NamedEdit]) -> LowRank:
    """One pair of factors from several: each factor takes the square root of weight * scaling, the sign goes to A."""
    factors = [named.edit for named in edits if isinstance(named.edit, LowRank)]
    ranks = {named.adapter: factor.rank for named, factor in zip(edits, factors, strict=True)}
    if len(set(ranks.values())) > 1:
        raise InvalidModel(
            f"combination_type 'linear' needs equal ranks, and on {tensor!r} they are {ranks}: use 'cat'", field=tensor
        )
    scales = [named.weight * factor.scaling for named, factor in zip(edits, factors, strict=True)]

    def a() -> Tensor:
        loaded = (wide(factor.a()) for factor in factors)
        return summed([x * math.copysign(math.sqrt(abs(s)), s) for x, s in zip(loaded, scales, strict=True)])

    def b() -> Tensor:
        loaded = (wide(factor.b()) for factor in factors)
        return summed([x * math.sqrt(abs(s)) for x, s in zip(loaded, scales, strict=True)])

    kind = TransposedLowRank if isinstance(factors[0], TransposedLowRank) else LowRank
    return kind(a, b, 1.0, factors[0].rank)
