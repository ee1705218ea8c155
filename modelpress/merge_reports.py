"""What is measured of a merge, as types: the part of the report that stands beside evaluation and drift."""

from __future__ import annotations

import math

from pydantic import Field

from modelpress.documents import Document


class LogitComparison(Document):
    """Two models' logits on the same seeded token ids, in FP32."""

    max_difference: float
    """Largest absolute difference of two logits."""
    max_logit: float
    """Largest absolute logit of the reference: what the difference is to be compared with."""
    label_changes: int
    """Positions whose largest logit is another one."""
    n: int
    """Positions compared."""

    @property
    def relative_difference(self) -> float:
        return self.max_difference / self.max_logit if self.max_logit else math.inf


class MergeReport(Document):
    """A merged model as it is stored, against what was merged.

    For adapters the reference is the base with the adapters beside it, unmerged, run by PEFT. A layer's difference is
    |y - y'| / |y| (Euclidean) over seeded random inputs, in FP32.
    """

    reference: str
    """e.g. `peft 0.21.2`; empty where there is no independent reference, as for merged checkpoints."""
    layers: int
    """Layers whose outputs were compared."""
    layer_difference: float | None
    """Largest difference of a layer; None where none was compared."""
    layer: str = ""
    """The layer that has it."""
    not_compared: dict[str, str] = Field(default_factory=dict)
    """Changed layers and tensors outside the comparison, and why; `*` stands for all of them."""
    over_memory_limit: int = 0
    """Of `not_compared`, how many the memory limit left out."""
    logits: LogitComparison | None = None
    logits_missing: str = ""
    """Why there are no logits, where there are none."""
    changed: int
    """Tensors whose bytes changed, new ones included."""
    byte_identical: int
    """Tensors whose bytes are those of the base."""
    largest_change: float
    """Largest |W' - W| / |W| (Frobenius) of a tensor that the base has in its shape; |W'| where |W| is 0."""
    largest_change_tensor: str = ""
    measured_by: str = ""
    """The conversion that measured it."""
