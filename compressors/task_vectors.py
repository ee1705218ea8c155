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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from modelpress.canonical import canonical_json
from modelpress.merge_recipes import NEEDS_DENSITY

BLOCK = 1 << 14
"""Elements worked on at a time: they fit a core's cache, and torch sums so few of them on one thread."""
STRAIGHT_SINE = 1e-4
"""Below this sine of the angle slerp is linear: nearly parallel, the two differ by less than FP32 resolves."""

MajoritySign = Literal["total", "frequency"]


@dataclass(frozen=True)
class Combination:
    """How several task vectors become one. `density` is the share of values kept, in (0, 1]."""

    method: str
    """`ties`, `dare_linear` or `dare_ties`."""
    density: float
    majority_sign_method: MajoritySign = "total"

    def __post_init__(self) -> None:
        if self.method not in NEEDS_DENSITY:
            raise ValueError(f"method is {self.method!r}: it must be one of {', '.join(NEEDS_DENSITY)}")
        if not 0 < self.density <= 1:
            raise ValueError(f"density is {self.density}: it must be in (0, 1]")


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
        if int(equal.count_nonzero()) > of_smallest:
            equal &= equal.cumsum(0) <= of_smallest
        of_smallest -= int(equal.count_nonzero())
        _keep(block, equal | (magnitudes > smallest))
    return vector


def _keep(block: Tensor, kept: Tensor) -> None:
    """Set the other values to 0.0, never to -0.0. A product is many times as fast here as `masked_fill_`."""
    block.mul_(kept).add_(0.0)


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
        kept = torch.rand(block.numel(), generator=generator) < density
        _keep(block.div_(density), kept)
    return vector


def elect_and_average(
    vectors: Sequence[Tensor], weights: Sequence[float], *, majority_sign_method: MajoritySign = "total"
) -> Tensor:
    """Each element: the mean of weight * value over the values that have the elected sign; 0 where there are none.

    Elected is the sign of the values' sum (`total`) or of the sum of their signs (`frequency`); plus where it is 0.
    """
    vote = VOTES[majority_sign_method]
    for blocks in _blocks(vectors):
        elected = torch.copysign(torch.ones(()), _sum(vote(block) for block in blocks).add_(0.0))  # -0.0 is no minus
        agreeing = [block.mul(elected).sign_().clamp_(min=0.0) for block in blocks]
        for block, weight, mine in zip(blocks, weights, agreeing, strict=True):
            block.mul_(weight).mul_(mine)
        blocks[0].copy_(_sum(iter(blocks)).div_(_sum(iter(agreeing)).clamp_(min=1.0)))
    return vectors[0]


VOTES: Mapping[MajoritySign, Callable[[Tensor], Tensor]] = {"total": torch.positive, "frequency": torch.sign}
"""What each vector adds to the election of a sign."""


def sign_conflicts(vectors: Sequence[Tensor]) -> float:
    """Share of elements, of those that any vector changes, for which vectors have opposite signs; changes nothing."""
    conflicts = changed = 0
    for blocks in _blocks(vectors):
        plus, minus = reduce(torch.maximum, blocks) > 0, reduce(torch.minimum, blocks) < 0
        conflicts += int((plus & minus).count_nonzero())
        changed += int((plus | minus).count_nonzero())
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
    square_start, square_end, product = _products(start, end)
    if not square_start or not square_end:
        return Arc(1 - way, way, None)
    cosine = product / (math.sqrt(square_start) * math.sqrt(square_end))
    angle = math.acos(min(1.0, max(-1.0, cosine)))
    if math.sin(angle) < STRAIGHT_SINE:
        return Arc(1 - way, way, angle)
    return Arc(math.sin((1 - way) * angle) / math.sin(angle), math.sin(way * angle) / math.sin(angle), angle)


def slerp(start: Tensor, end: Tensor, way: float) -> Tensor:
    """The point `way` of the arc from `start` to `end`, FP32; exactly `start` at 0 and `end` at 1."""
    point = arc(start, end, way)
    return blend((start, end), (point.start_weight, point.end_weight))


def blend(tensors: Sequence[Tensor], weights: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
    """The sum of weight * tensor, summed in FP64 and rounded once to `dtype`; a new tensor, from any floating dtypes.

    In FP32, weights of at least 0 that sum to 1 up to FP64 leave an element as it is that all tensors share, and one
    weight of 1 among zeros gives that tensor.
    """
    used = [(tensor.reshape(-1), weight) for tensor, weight in zip(tensors, weights, strict=True) if weight]
    result = torch.zeros(tensors[0].shape, dtype=dtype)
    targets = torch.split(result.view(-1), BLOCK) if used else ()
    for target, *blocks in zip(targets, *(torch.split(tensor, BLOCK) for tensor, _ in used), strict=True):
        weighted = zip(blocks, used, strict=True)
        target.copy_(_sum(block.to(torch.float64) * weight for block, (_, weight) in weighted))
    return result


def _products(start: Tensor, end: Tensor) -> tuple[float, float, float]:
    """start . start, end . end and start . end of the flattened tensors, in FP64."""
    pairs = zip(torch.split(start.reshape(-1), BLOCK), torch.split(end.reshape(-1), BLOCK), strict=True)
    sums = [(float((a * a).sum()), float((b * b).sum()), float((a * b).sum())) for a, b in _in_float64(pairs)]
    first, second, mixed = zip(*sums, strict=True)
    return math.fsum(first), math.fsum(second), math.fsum(mixed)


def _in_float64(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    return ((left.to(torch.float64), right.to(torch.float64)) for left, right in pairs)
