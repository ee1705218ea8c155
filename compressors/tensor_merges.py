"""One tensor of several checkpoints merged: what each method of `merge_models` does with it.

    linear         (1 - sum of weights) * base + sum of weight * model, summed in FP64
    slerp          the base and one model, whose weight is the way between them
    ties, dare_*   base + the task vectors combined (`task_vectors.py`); a task vector is model minus base

TIES' shares are taken within each tensor, as PEFT takes them, not over the whole model. Elements that all models share
stay as they are in the base.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compressors.changes import Rows, Unchanged, wide
from compressors.rounding import same_bytes
from compressors.task_vectors import Combination, arc, blend, mask_seed, sign_conflicts, sparsify, unite
from compressors.weight_files import WeightFiles
from modelpress.errors import InternalError, InvalidModel
from modelpress.merge_recipes import MergeModels


@dataclass(frozen=True)
class Checkpoint:
    """A model that is merged into the base."""

    name: str
    weight: float
    files: WeightFiles

    def load(self, tensor: str) -> Tensor:
        """One tensor in its stored dtype, with rows. InvalidModel where it holds NaN or infinity."""
        return _checked(self.files.load(tensor), tensor, of=f"model {self.name!r}")


Note = Callable[[str, float | None], None]
"""note(tensor, figure): a model differs from the base there; by an angle, a share of sign conflicts, or None."""


@dataclass(frozen=True)
class TensorMerge:
    """The change of one tensor of the base: the same tensor of every model merged into it."""

    name: str
    models: Sequence[Checkpoint]
    arguments: MergeModels
    seed: int
    note: Note

    def begin(self, stored: Tensor) -> Rows:
        return METHODS[self.arguments.merge_method](self, _checked(stored, self.name, of="the base"))

    @property
    def weights(self) -> list[float]:
        return [model.weight for model in self.models]


def average(merge: TensorMerge, base: Tensor) -> Rows:
    """Task arithmetic (Ilharco et al. 2022) written as a weighted sum of models: exact where the base's weight is 0."""
    tensors = [model.load(merge.name) for model in merge.models]
    if all(same_bytes(base, tensor) for tensor in tensors):
        return Unchanged().begin(base)
    merge.note(merge.name, None)
    return _blended((base, *tensors), (1 - math.fsum(merge.weights), *merge.weights))


def interpolate(merge: TensorMerge, base: Tensor) -> Rows:
    """SLERP from the base to the one model."""
    (model,) = merge.models
    end = model.load(merge.name)
    if same_bytes(base, end):
        return Unchanged().begin(base)
    point = arc(base, end, model.weight)
    merge.note(merge.name, point.angle_rad)
    return _blended((base, end), (point.start_weight, point.end_weight))


def _blended(tensors: Sequence[Tensor], weights: Sequence[float]) -> Rows:
    dtype = wide(tensors[0][:0]).dtype
    return lambda start, stop: blend([tensor[start:stop] for tensor in tensors], weights, dtype)


def add_task_vectors(merge: TensorMerge, base: Tensor) -> Rows:
    """base + the combined task vectors. One model's tensor after the other is read and made its task vector."""
    vectors = [task_vector(base, model.load(merge.name)) for model in merge.models]
    if not any(vector.any() for vector in vectors):
        return Unchanged().begin(base)
    combination = _combination(merge.arguments)
    seeds = [mask_seed(merge.seed, name=model.name, tensor=merge.name) for model in merge.models]
    sparsify(vectors, combination, seeds=seeds)
    merge.note(merge.name, sign_conflicts(vectors))
    change = unite(vectors, merge.weights, combination)

    def rows(start: int, stop: int) -> Tensor:
        taken = 0.0 - change[start:stop]
        return wide(base[start:stop]) - taken  # -0.0 stays: -0.0 - 0.0 is -0.0, but -0.0 + 0.0 is 0.0

    return rows


def task_vector(base: Tensor, model: Tensor) -> Tensor:
    """model - base in FP32. `model` is used up."""
    return wide(model).sub_(base).to(torch.float32)


def _combination(arguments: MergeModels) -> Combination:
    if arguments.density is None:
        raise InternalError(f"{arguments.merge_method} has no density")
    return Combination(arguments.merge_method, arguments.density, arguments.majority_sign_method)


METHODS: Mapping[str, Callable[[TensorMerge, Tensor], Rows]] = {
    "linear": average,
    "slerp": interpolate,
    "ties": add_task_vectors,
    "dare_linear": add_task_vectors,
    "dare_ties": add_task_vectors,
}


def _checked(tensor: Tensor, name: str, *, of: str) -> Tensor:
    """The tensor, with rows even where it is a scalar. InvalidModel where it holds NaN or infinity."""
    if tensor.numel() and not all(math.isfinite(float(bound)) for bound in torch.aminmax(tensor)):
        raise InvalidModel(
            f"tensor {name!r} of {of} holds NaN or infinite values: go back to an earlier checkpoint",
            reason="NON_FINITE",
            field=name,
        )
    return tensor if tensor.ndim else tensor.reshape(1)
