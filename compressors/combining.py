"""Several adapters on one tensor made into one change, under the names of PEFT's combination types.

`cat` is the weighted sum itself. `linear` is PEFT's: the factors are summed before they are multiplied. `svd` cuts the
weighted sum to a rank (Eckart and Young 1936). TIES and DARE work on the changes themselves, as their papers do, where
PEFT applies them to the factors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from compressors.changes import Change, Rows, wide
from compressors.edits import (
    Chain,
    Edit,
    Experts,
    LowRank,
    OneExpert,
    Replacement,
    RowsOf,
    Shift,
    TokenRows,
    delta_rows,
)
from compressors.rounding import row_blocks
from compressors.task_vectors import Combination, combine, mask_seed
from compressors.weighted_sum import Weighted, WeightedSum, summed
from modelpress.errors import InternalError, InvalidModel
from modelpress.merge_recipes import MergeLora

ValueT = TypeVar("ValueT")


@dataclass(frozen=True)
class NamedEdit:
    """What one adapter does to the tensor."""

    adapter: str
    edit: Edit
    weight: float


def combined(tensor: str, edits: Sequence[NamedEdit], arguments: MergeLora, *, seed: int) -> Change:
    """The change of one tensor by every adapter that has an edit of it.

    What was saved whole, and biases, are no low-rank changes: every combination type sums them by their weights.
    InvalidModel where `linear` or `svd` needs factors that an edit does not have.
    """
    weighted = [(named.edit, named.weight) for named in edits]
    method = arguments.combination_type
    if method == "cat" or all(is_saved(named.edit) for named in edits):
        return WeightedSum(weighted)
    if method == "linear":
        return WeightedSum([(_linear(tensor, edits), 1.0)])
    if method == "svd":
        return WeightedSum([(_cut(_stacked(tensor, edits), _required(arguments.svd_rank)), 1.0)])
    seeds = tuple(mask_seed(seed, name=named.adapter, tensor=tensor) for named in edits)
    settings = Combination(method, _required(arguments.density), arguments.majority_sign_method)
    return Combined(weighted, settings, seeds)


def is_saved(edit: Edit) -> bool:
    """Whether the edit brings a tensor, or rows of one, as trained, or shifts a bias."""
    if isinstance(edit, Chain):
        return is_saved(edit.first) and is_saved(edit.then)
    return isinstance(edit, Replacement | TokenRows | Shift)


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


def whole(rows: RowsOf, stored: Tensor) -> Tensor:
    """Every row of a change, in one contiguous tensor."""
    result = torch.empty(stored.shape, dtype=wide(stored[:0]).dtype)
    for start, stop in row_blocks(tuple(stored.shape)):
        result[start:stop] = rows(start, stop, wide(stored[start:stop]))
    return result


def _linear(tensor: str, edits: Sequence[NamedEdit]) -> Edit:
    """One pair of factors from several: each factor takes the square root of weight * scaling, the sign goes to A."""
    first = edits[0].edit
    if isinstance(first, OneExpert):
        fused = [replace(n, edit=n.edit.fused) for n in edits if isinstance(n.edit, OneExpert)]
        summed_factors = _linear(tensor, fused)
        if len(fused) == len(edits) and isinstance(summed_factors, Experts):
            return replace(first, fused=summed_factors)
    factors = _factors(tensor, edits, "linear")
    ranks = {named.adapter: factor.rank for named, factor in zip(edits, factors, strict=True)}
    if len(set(ranks.values())) > 1:
        raise InvalidModel(
            f"combination_type 'linear' needs equal ranks, and on {tensor!r} they are {ranks}: use 'cat'", field=tensor
        )
    scales = [named.weight * factor.scaling for named, factor in zip(edits, factors, strict=True)]

    def a() -> Tensor:
        halves = [math.copysign(math.sqrt(abs(scale)), scale) for scale in scales]
        return summed([wide(factor.a()) * half for factor, half in zip(factors, halves, strict=True)])

    def b() -> Tensor:
        return summed([wide(factor.b()) * math.sqrt(abs(s)) for factor, s in zip(factors, scales, strict=True)])

    return replace(factors[0], a=a, b=b, scaling=1.0)


def _stacked(tensor: str, edits: Sequence[NamedEdit]) -> LowRank:
    """The weighted sum as one pair of factors: their ranks added up (PEFT's `cat`)."""
    factors = [factor for factor in _factors(tensor, edits, "svd") if isinstance(factor, LowRank)]
    if len(factors) < len(edits):
        raise _not_possible("svd", tensor, "fused experts")
    scales = [named.weight * factor.scaling for named, factor in zip(edits, factors, strict=True)]

    def a() -> Tensor:
        return torch.cat([wide(factor.a()) * scale for factor, scale in zip(factors, scales, strict=True)], dim=0)

    def b() -> Tensor:
        return torch.cat([wide(factor.b()) for factor in factors], dim=1)

    return replace(factors[0], a=a, b=b, scaling=1.0, rank=sum(factor.rank for factor in factors))


def _cut(full: LowRank, rank: int) -> LowRank:
    """The nearest change of that rank (Eckart and Young 1936), from the factors alone: their QR decompositions leave a
    matrix of rank by rank to decompose.
    """

    return replace(full, a=lambda: _halves(full, rank)[0], b=lambda: _halves(full, rank)[1], rank=rank)


def _halves(full: LowRank, rank: int) -> tuple[Tensor, Tensor]:
    """A and B of the cut change; those of the full one where they are not finite, which the engine tells by name."""
    a, b = full.a(), full.b()
    q_b, r_b = torch.linalg.qr(b.flatten(1).double())
    q_a, r_a = torch.linalg.qr(a.flatten(1).double().T)
    core = r_b @ r_a.T
    if not torch.isfinite(core).all():
        return a, b
    u, s, vh = torch.linalg.svd(core)
    kept_a, kept_b = vh[:rank] @ q_a.T, q_b @ (u[:, :rank] * s[:rank])
    return kept_a.float().reshape(-1, *a.shape[1:]), kept_b.float().reshape(b.shape[0], -1, *b.shape[2:])


def _factors(tensor: str, edits: Sequence[NamedEdit], method: str) -> list[LowRank | Experts]:
    """Every edit's factors, of one kind."""
    found = [named.edit for named in edits if isinstance(named.edit, LowRank | Experts)]
    if len(found) < len(edits) or len({type(factor) for factor in found}) > 1:
        other = next((n.edit for n in edits if not isinstance(n.edit, LowRank | Experts)), edits[-1].edit)
        raise _not_possible(method, tensor, type(other).__name__)
    return found


def _not_possible(method: str, tensor: str, kind: str) -> InvalidModel:
    return InvalidModel(
        f"combination_type {method!r} combines the factors of plain LoRA, and {tensor!r} is changed by {kind}: use "
        "'cat'",
        field=tensor,
    )


def _required(value: ValueT | None) -> ValueT:
    """A setting that the recipe's own rules demand for this combination type."""
    if value is None:
        raise InternalError("a combination type came without the setting that it needs")
    return value
