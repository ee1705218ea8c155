"""Several task vectors of one tensor made into one, and tensors interpolated. Written from the papers, tensors only.

A task vector is what training added to a tensor: model minus base (Ilharco et al. 2022), or an adapter's change.

    ties           Yadav et al. 2023: trim, elect signs, average what agrees
    dare_linear    Yu et al. 2023: drop at random and rescale, then the weighted sum
    dare_ties      the same drop, then the election and average of TIES
    slerp          Shoemake 1985, on two whole tensors

Task vectors are contiguous FP32 tensors of one shape, and are given away: every function works in place, in blocks, and
returns one of them. So N vectors need the memory of N + 1. Results do not depend on the number of threads.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from modelpress.canonical import canonical_json

BLOCK = 1 << 14
"""Elements worked on at a time: they fit a core's cache, and torch sums so few of them on one thread."""
STRAIGHT_SINE = 1e-4
"""Below this sine of the angle slerp is linear: nearly parallel, the two differ by less than FP32 resolves."""

MajoritySign = Literal["total", "frequency"]


@dataclass(frozen=True)
class Combination:
    """How several task vectors become one. `density` is the share of values kept, in (0, 1]."""

    method: Literal["ties", "dare_linear", "dare_ties"]
    density: float
    majority_sign_method: MajoritySign = "total"


def combine(
    vectors: Sequence[Tensor], weights: Sequence[float], combination: Combination, *, seeds: Sequence[int]
) -> Tensor:
    """One task vector from several. `seeds`, one per vector, choose the values that DARE drops (see `mask_seed`)."""
    sparsify(vectors, combination, seeds=seeds)
    return unite(vectors, weights, combination)


def sparsify(vectors: Sequence[Tensor], combination: Combination, *, seeds: Sequence[int]) -> None:
    """The first step of `combine`: set to zero what each vector does not keep."""
    for vector, seed in zip(vectors, seeds, strict=True):
        if combination.method == "ties":
            trim(vector, combination.density)
        else:
            drop_and_rescale(vector, combination.density, torch.Generator().manual_seed(seed))


def unite(vectors: Sequence[Tensor], weights: Sequence[float], combination: Combination) -> Tensor:
    """The second step of `combine`: the weighted sum, or the average of what agrees with the elected signs."""
    if combination.method == "dare_linear":
        return weighted_sum(vectors, weights)
    return elect_and_average(vectors, weights, majority_sign_method=combination.majority_sign_method)


def mask_seed(seed: int, *, name: str, tensor: str) -> int:
    """The seed of one random mask, in [0, 2^63): of the request's seed, the adapter's or model's name and the tensor's.

    So a mask does not depend on the order of tensors, on shards, or on where a merge was resumed.
    """
    digest = hashlib.sha256(canonical_json([seed, name, tensor])).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def weighted_sum(vectors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The sum of weight * vector, in the order given (task arithmetic)."""
    for first, *others in _blocks(vectors):
        first.mul_(weights[0])
        for other, weight in zip(others, weights[1:], strict=True):
            first.add_(other.mul_(weight))
    return vectors[0]


def ties(
    vectors: Sequence[Tensor], weights: Sequence[float], *, density: float, majority_sign_method: MajoritySign = "total"
) -> Tensor:
    """Trim each vector to `density`, elect each element's sign, average the weighted values that have it.

    Weights do not vote, as in PEFT: they multiply the values after the election.
    """
    for vector in vectors:
        trim(vector, density)
    return elect_and_average(vectors, weights, majority_sign_method=majority_sign_method)


def trim(vector: Tensor, density: float) -> Tensor:
    """Keep the int(density * n) largest magnitudes, at least one; of equal ones those that come first in the tensor."""
    flat = vector.view(-1)
    kept = max(1, int(density * flat.numel()))
    if kept >= flat.numel():
        return vector
    smallest, of_smallest = _smallest_kept(flat, kept)
    for block in torch.split(flat, BLOCK):
        magnitudes = block.abs()
        equal = magnitudes == smallest
        first_equal = equal & (equal.cumsum(0) <= of_smallest)
        of_smallest -= int(first_equal.sum())
        block.masked_fill_(~(first_equal | (magnitudes > smallest)), 0.0)
    return vector


def _smallest_kept(flat: Tensor, kept: int) -> tuple[float, int]:
    """The `kept`-th largest magnitude, and how many of the values that have it belong to the `kept` largest."""
    magnitudes = flat.abs().numpy()
    first = len(magnitudes) - kept
    magnitudes.partition(first)
    return float(magnitudes[first]), int((magnitudes[first:] == magnitudes[first]).sum())


def drop_and_rescale(vector: Tensor, density: float, generator: torch.Generator) -> Tensor:
    """Keep each value with probability `density`, divided by it, else zero: the expectation is `vector` (DARE)."""
    if density == 1:
        return vector
    for block in torch.split(vector.view(-1), BLOCK):
        dropped = torch.rand(block.numel(), generator=generator) >= density
        block.div_(density).masked_fill_(dropped, 0.0)
    return vector


def elect_and_average(
    vectors: Sequence[Tensor], weights: Sequence[float], *, majority_sign_method: MajoritySign = "total"
) -> Tensor:
    """Each element: the mean of weight * value over the values that have the elected sign; 0 where there are none.

    Elected is the sign of the values' sum (`total`) or of the sum of their signs (`frequency`); plus where it is 0.
    """
    vote = VOTES[majority_sign_method]
    for blocks in _blocks(vectors):
        is_plus = _sum(vote(block) for block in blocks) >= 0
        agreeing = [torch.where(is_plus, block > 0, block < 0) for block in blocks]
        values = (block.mul_(weight) * mine for block, weight, mine in zip(blocks, weights, agreeing, strict=True))
        mean = _sum(values) / _sum(mine.to(torch.float32) for mine in agreeing).clamp_(min=1.0)
        blocks[0].copy_(mean)
    return vectors[0]


VOTES: Mapping[MajoritySign, Callable[[Tensor], Tensor]] = {"total": torch.positive, "frequency": torch.sign}
"""What each vector adds to the election of a sign."""


def sign_conflicts(vectors: Sequence[Tensor]) -> float:
    """Share of elements, of those that any vector changes, for which vectors have opposite signs; changes nothing."""
    conflicts = changed = 0
    for blocks in _blocks(vectors):
        plus = torch.stack([block > 0 for block in blocks]).any(0)
        minus = torch.stack([block < 0 for block in blocks]).any(0)
        conflicts += int((plus & minus).sum())
        changed += int((plus | minus).sum())
    return conflicts / changed if changed else 0.0


def _blocks(vectors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Views of the same elements of every vector, BLOCK at a time."""
    return zip(*(torch.split(vector.view(-1), BLOCK) for vector in vectors), strict=True)


def _sum(tensors: Iterator[Tensor]) -> Tensor:
    """A new tensor: the sum in the order given."""
    total = next(tensors).clone()
    for tensor in tensors:
        total.add_(tensor)
    return total


@dataclass(frozen=True)
class Arc:
    """A point between two tensors: start_weight * start + end_weight * end."""

    start_weight: float
    end_weight: float
    angle_rad: float | None
    """Between the flattened tensors; None where one of them is zero."""


def arc(start: Tensor, end: Tensor, way: float) -> Arc:
    """The point `way`, 0 to 1, of the great arc between two tensors, seen as vectors: Shoemake 1985 on their angle.

    For equal norms the point has that norm. Nearly parallel tensors are interpolated linearly, and so are opposite
    ones and zero tensors, between which there is no great arc.
    """
    square_start, square_end = _dot(start, start), _dot(end, end)
    if not square_start or not square_end:
        return Arc(1 - way, way, None)
    cosine = _dot(start, end) / (math.sqrt(square_start) * math.sqrt(square_end))
    angle = math.acos(min(1.0, max(-1.0, cosine)))
    if math.sin(angle) < STRAIGHT_SINE:
        return Arc(1 - way, way, angle)
    return Arc(math.sin((1 - way) * angle) / math.sin(angle), math.sin(way * angle) / math.sin(angle), angle)


def slerp(start: Tensor, end: Tensor, way: float) -> Tensor:
    """The point `way` of the arc from `start` to `end`, FP32; exactly `start` at 0 and `end` at 1."""
    point = arc(start, end, way)
    return blend((start, end), (point.start_weight, point.end_weight))


def blend(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The sum of weight * tensor, summed in FP64 and rounded once to FP32; a new tensor, any floating dtypes.

    Weights that sum to 1 up to FP64 leave an element as it is that all tensors share, and one weight of 1 among zeros
    gives that tensor.
    """
    used = [(tensor, weight) for tensor, weight in zip(tensors, weights, strict=True) if weight]
    if not used:
        return torch.zeros(tensors[0].shape)
    return _sum(tensor.to(torch.float64) * weight for tensor, weight in used).to(torch.float32)


def _dot(left: Tensor, right: Tensor) -> float:
    """The sum of products, in FP64."""
    pairs = zip(torch.split(left.reshape(-1), BLOCK), torch.split(right.reshape(-1), BLOCK), strict=True)
    return math.fsum(float((a.to(torch.float64) * b.to(torch.float64)).sum()) for a, b in pairs)
