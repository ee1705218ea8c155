"""The stages that merge, as types of the recipe: adapters into a base, and whole checkpoints of one architecture.

    method: merge_lora
    combination_type: ties
    density: 0.5

Names follow PEFT (`combination_type`) and mergekit (`merge_method`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from modelpress.documents import Document

NEEDS_DENSITY = ("ties", "dare_linear", "dare_ties")
"""Combinations that drop a share of each change's values. PEFT has them too, and applies them to adapters' factors."""
MAX_RANK = 65_536
"""Of an adapter, and of what `svd` keeps."""


NO_REFERENCE = "merged checkpoints have no independent reference"
LAYERS_ALONE = "the base is quantized: its runtime repacks weights, so layers alone are compared"


def each_once(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names; ValueError where one stands twice."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice[:80]!r} is given twice")
    return names


class Merge(Document):
    """What every merge shares: FP32 arithmetic on files, one rounding at the end, no model in memory."""

    density: float | None = Field(default=None, gt=0, le=1)
    """Share of each task vector's values that TIES and DARE keep, in (0, 1]; needed by them, refused elsewhere."""
    majority_sign_method: Literal["total", "frequency"] = "total"
    """How TIES elects a sign: by the sum of the values, or by the number of models."""
    output_dtype: Literal["stored", "float32", "bfloat16", "float16"] = "stored"
    """dtype of the tensors that the merge changes; `stored`: each keeps its own."""

    def _check_density(self, method: str) -> None:
        needed = method in NEEDS_DENSITY
        if needed and self.density is None:
            raise ValueError(f"density is needed by {method!r}: the share of values to keep, e.g. 0.5")
        if not needed and self.density is not None:
            raise ValueError(f"density is used by {', '.join(NEEDS_DENSITY)} only: leave it out for {method!r}")


class MergeLora(Merge):
    """Fold adapters into the base model. `combination_type` has PEFT's names; it says how several become one change.

    cat            the weighted sum of their changes, exactly
    linear         PEFT's: factors are summed before they are multiplied, so equal ranks are needed
    svd            the weighted sum, cut to `svd_rank` by a singular value decomposition
    ties           Yadav et al. 2023, on the changes themselves
    dare_linear    Yu et al. 2023, on the changes themselves: seeded random drop and rescale, then the weighted sum
    dare_ties      the same drop, then TIES' sign election
    """

    method: Literal["merge_lora"] = "merge_lora"
    adapters: tuple[str, ...] = ()
    """Names of the request's adapters to merge, in order. Empty: all of them."""
    combination_type: Literal["cat", "linear", "svd", "ties", "dare_linear", "dare_ties"] = "cat"
    svd_rank: int | None = Field(default=None, ge=1, le=MAX_RANK)
    """Rank that `svd` keeps; needed by it, refused elsewhere."""
    labels: tuple[str, ...] = ()
    """Class names of a trained classification head that the adapter brings and the base does not have."""
    dequantize_base: bool = False
    """Merge into the dequantized weights of a quantized base; the output is not quantized."""

    @field_validator("adapters", "labels")
    @classmethod
    def _named_once(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return each_once(names)

    @property
    def without_reference(self) -> str:
        """Why PEFT's own layers are no reference for this merge; empty where they are."""
        if self.combination_type not in NEEDS_DENSITY:
            return ""
        arithmetic = f"PEFT applies {self.combination_type} to the adapters' factors, not to their changes"
        return f"{arithmetic}: there is no independent reference"

    @property
    def without_logits(self) -> str:
        """Why the whole model's logits are not compared; empty where they are, memory permitting."""
        return self.without_reference or (LAYERS_ALONE if self.dequantize_base else "")

    @model_validator(mode="after")
    def _settings_are_used(self) -> MergeLora:
        self._check_density(self.combination_type)
        if (self.combination_type == "svd") != (self.svd_rank is not None):
            raise ValueError("svd_rank belongs to combination_type 'svd': give both, or neither")
        return self


class MergeModels(Merge):
    """Merge whole checkpoints of one architecture into the base; task vectors are model minus base.

    linear         base + weighted sum of task vectors: for weights that sum to 1 their weighted average
    slerp          Shoemake 1985, tensor by tensor, between the base and one model; its weight is the way, 0 to 1
    ties           Yadav et al. 2023
    dare_linear    Yu et al. 2023, with the weighted sum
    dare_ties      Yu et al. 2023, with TIES' sign election
    """

    method: Literal["merge_models"] = "merge_models"
    models: tuple[str, ...] = ()
    """Names of the request's models to merge, in order. Empty: all of them."""
    merge_method: Literal["linear", "slerp", "ties", "dare_linear", "dare_ties"] = "linear"

    @field_validator("models")
    @classmethod
    def _named_once(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return each_once(names)

    @property
    def without_reference(self) -> str:
        return NO_REFERENCE

    @property
    def without_logits(self) -> str:
        return NO_REFERENCE

    @model_validator(mode="after")
    def _settings_are_used(self) -> MergeModels:
        self._check_density(self.merge_method)
        return self
