"""The nouns that every part of the report is made of: figures with units, counts, sizes."""

from __future__ import annotations

from modelpress.documents import Document


class Interval(Document):
    low: float
    high: float
    confidence: float
    method: str
    """The interval's name in the literature, e.g. `Wilson 1927`."""


class Metric(Document):
    name: str
    value: float | None
    unit: str
    """`fraction`, `nats`, `bytes`, `ms`, `ratio`, `logits` or `count`."""
    n: int
    """Examples, or repeats, that the value comes from."""
    interval: Interval | None = None


class PairedCounts(Document):
    """Baseline and candidate on the same examples: what the paired interval is computed from."""

    both_right: int
    only_baseline_right: int
    only_candidate_right: int
    both_wrong: int

    @property
    def n(self) -> int:
        return self.both_right + self.only_baseline_right + self.only_candidate_right + self.both_wrong

    @property
    def accuracy_drop(self) -> float:
        return (self.only_baseline_right - self.only_candidate_right) / self.n


class Footprint(Document):
    baseline_bytes: int
    """All files of the baseline's model folder that hold weights (`.onnx`, `.onnx.data`, `.safetensors`)."""
    candidate_bytes: int
    baseline_parameters: int
    candidate_parameters: int

    @property
    def ratio(self) -> float:
        return self.candidate_bytes / self.baseline_bytes


class ParityReport(Document):
    """The same inputs through the compressed model in torch and through its export in the runtime."""

    max_logit_difference: float
    mean_logit_difference: float
    label_changes: int
    n: int
