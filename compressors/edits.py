"""What one adapter does to one tensor of the base: pure arithmetic, written from the papers.

LoRA: Hu et al. 2021; the scaling of rsLoRA: Kalajdzievski 2023; DoRA: Liu et al. 2024. Names follow PEFT 0.21.
Shapes: O outputs, I inputs, R rank, E experts, K a convolution's kernel.

An edit is begun with the base tensor and then gives, for FP32 rows [start, stop) of the base, the same rows at weight
1: an additive edit as what is added to them, any other as what they become.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from compressors.changes import Scratch, wide
from compressors.rounding import row_blocks

Load = Callable[[], Tensor]
"""Reads one tensor of an adapter when it is needed."""
RowsOf = Callable[[int, int, Tensor], Tensor]
"""rows(start, stop, base): `base` holds those rows in FP32 and is left alone; the result is the caller's to change, and
counts until the next call."""


class Additive(ABC):
    """W + delta."""

    @abstractmethod
    def deltas(self, stored: Tensor) -> RowsOf:
        """Rows of the change."""


class Rewriting(ABC):
    """W becomes something that depends on it, or on nothing."""

    @abstractmethod
    def rewritten(self, stored: Tensor) -> RowsOf:
        """Rows of the result."""


Edit = Additive | Rewriting


@dataclass(frozen=True)
class LowRank(Additive):
    """W + scaling * B @ A for W [O, I] or a convolution's [O, I, K...]; `a` is [R, I, K...], `b` [O, R, 1...]."""

    a: Load
    b: Load
    scaling: float
    rank: int
    products: Scratch = field(default_factory=lambda: Scratch(torch.float32), compare=False, repr=False)
    """Where B @ A is computed: one adapter's edits share it, and are worked on one after the other."""

    def deltas(self, stored: Tensor) -> RowsOf:
        product = self.product()
        scratch = Scratch(product.dtype)

        def rows(start: int, stop: int, base: Tensor) -> Tensor:
            block = product[start:stop]
            return torch.mul(block, self.scaling, out=scratch.take(block.shape)).reshape(base.shape)

        return rows

    def product(self) -> Tensor:
        """B @ A as a whole, [O, I * K...]: on some processors blocks of it have other last bits. It counts until the
        adapter's next one is computed.
        """
        a, b = self.factors()
        memory = self.products if self.products.dtype == b.dtype else Scratch(b.dtype)
        return torch.mm(b, a, out=memory.take((b.shape[0], a.shape[1])))

    def factors(self) -> tuple[Tensor, Tensor]:
        """A [R, I * K...] and B [O, R] in FP32."""
        a, b = wide(self.a()), wide(self.b())
        return a.flatten(1), b.flatten(1)


@dataclass(frozen=True)
class TransposedLowRank(LowRank):
    """The same for a weight that is stored as [I, O]: transformers' Conv1D, and embeddings, [tokens, width].

    An embedding's `a` is [R, tokens], its `b` [width, R].
    """

    def deltas(self, stored: Tensor) -> RowsOf:
        product = self.product()
        return lambda start, stop, base: product[:, start:stop].T * self.scaling


@dataclass(frozen=True)
class Experts(Additive):
    """LoRA on the fused experts of a layer, W [E, O, I]: `a` is [R * E, I], `b` [O, R * E], as PEFT lays them out.

    `transposed`: W is [E, I, O].
    """

    a: Load
    b: Load
    scaling: float
    rank: int
    transposed: bool = False

    def deltas(self, stored: Tensor) -> RowsOf:
        experts = list(self.each())

        def rows(start: int, stop: int, base: Tensor) -> Tensor:
            deltas = torch.stack([b @ a for a, b in experts[start:stop]]).mul_(self.scaling)
            return deltas.transpose(1, 2) if self.transposed else deltas

        return rows

    def each(self) -> Iterator[tuple[Tensor, Tensor]]:
        """A [R, I] and B [O, R] of every expert in FP32."""
        a, b = wide(self.a()), wide(self.b())
        count = a.shape[0] // self.rank
        a_ERI, b_ORE = a.reshape(count, self.rank, -1), b.reshape(-1, self.rank, count)
        yield from ((a_ERI[expert], b_ORE[:, :, expert]) for expert in range(count))


@dataclass(frozen=True)
class OneExpert(Additive):
    """The part of `fused` that is one expert's own tensor: rows [first, last) of expert number `expert`.

    Checkpoints often store each expert's matrices alone, where the loaded model has them fused.
    """

    fused: Experts
    expert: int
    first: int
    last: int

    def deltas(self, stored: Tensor) -> RowsOf:
        a, b = list(self.fused.each())[self.expert]
        own = b[self.first : self.last]
        return lambda start, stop, base: (own[start:stop] @ a).mul_(self.fused.scaling)


@dataclass(frozen=True)
class Shift(Additive):
    """bias + scaling * value, both [O]: the bias of a lora_B."""

    value: Load
    scaling: float

    def deltas(self, stored: Tensor) -> RowsOf:
        value = wide(self.value()) * self.scaling
        return lambda start, stop, base: value[start:stop].clone()


@dataclass(frozen=True)
class Replacement(Rewriting):
    """The trained tensor itself: of modules_to_save, a bias that was trained along, a resized embedding."""

    value: Load

    def rewritten(self, stored: Tensor) -> RowsOf:
        value = self.value()
        value = value if value.ndim else value.reshape(1)
        return lambda start, stop, base: wide(value[start:stop]).clone()


@dataclass(frozen=True)
class TokenRows(Rewriting):
    """Some rows of an embedding, [tokens, width], replaced: PEFT's trainable_token_indices."""

    rows: Load
    indices: tuple[int, ...]

    def rewritten(self, stored: Tensor) -> RowsOf:
        new = wide(self.rows())

        def rows(start: int, stop: int, base: Tensor) -> Tensor:
            result = base.clone()
            for position, index in enumerate(self.indices):
                if start <= index < stop:
                    result[index - start] = new[position]
            return result

        return rows


@dataclass(frozen=True)
class Dora(Rewriting):
    """magnitude * V / |V| with V = W + delta; the norm is taken over everything but the output's dimension.

    `magnitude` has O values. `output_dim` is 0, or 1 where W is stored as [I, O].
    """

    direction: LowRank
    magnitude: Load
    output_dim: int = 0

    def rewritten(self, stored: Tensor) -> RowsOf:
        deltas = self.direction.deltas(stored)
        magnitude = wide(self.magnitude()).flatten()
        if self.output_dim == 0:
            return lambda start, stop, base: _scaled(base + deltas(start, stop, base), magnitude[start:stop])
        squares = torch.zeros(stored.shape[1], dtype=magnitude.dtype)
        for start, stop in row_blocks(tuple(stored.shape)):
            base = wide(stored[start:stop])
            squares += (base + deltas(start, stop, base)).square().sum(0)
        factor = magnitude / squares.sqrt()
        return lambda start, stop, base: factor * (base + deltas(start, stop, base))


@dataclass(frozen=True)
class Chain(Rewriting):
    """One edit, and another on top of its result: a bias that was trained along, and the bias of its lora_B."""

    first: Edit
    then: Additive

    def rewritten(self, stored: Tensor) -> RowsOf:
        first, then = result_rows(self.first, stored), self.then.deltas(stored)
        return lambda start, stop, base: first(start, stop, base) + then(start, stop, base)


def _scaled(rows: Tensor, magnitude: Tensor) -> Tensor:
    """Every row brought to its norm."""
    factor: Tensor = magnitude / torch.linalg.vector_norm(rows.flatten(1), dim=1)
    return factor.reshape(-1, *[1] * (rows.ndim - 1)) * rows


def delta_rows(edit: Edit, stored: Tensor) -> RowsOf:
    """What any edit adds at weight 1."""
    if isinstance(edit, Additive):
        return edit.deltas(stored)
    rewritten = edit.rewritten(stored)
    return lambda start, stop, base: rewritten(start, stop, base) - base


def result_rows(edit: Edit, stored: Tensor) -> RowsOf:
    """What the rows become by any edit at weight 1."""
    if isinstance(edit, Rewriting):
        return edit.rewritten(stored)
    deltas = edit.deltas(stored)
    return lambda start, stop, base: deltas(start, stop, base).to(base.dtype).add_(base)


def lora_factors(edit: Edit) -> tuple[LowRank | Experts, ...]:
    """The pairs of factors in an edit, e.g. one in a DoRA edit, none in a replacement."""
    match edit:
        case LowRank() | Experts():
            return (edit,)
        case OneExpert():
            return (edit.fused,)
        case Dora():
            return (edit.direction,)
        case Chain():
            return (*lora_factors(edit.first), *lora_factors(edit.then))
    return ()
