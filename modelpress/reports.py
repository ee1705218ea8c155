"""The report: every figure that was measured, as types. `report.json` is `Report` in canonical field order.

Units stand in the names: `_bytes`, `_s`, `_ms`. Shares are fractions. A figure that could not be computed is
None and `warnings` says why; a figure that was not measured has no field set.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from pydantic import Field

from modelpress.documents import Document
from modelpress.merge_reports import MergeReport

SCHEMA_VERSION = 1


class Verdict(str, Enum):
    APPROVED = "APPROVED"
    REJECTED = "REJECTED"
    INCONCLUSIVE = "INCONCLUSIVE"


class Outcome(str, Enum):
    """One gate's outcome."""

    PASSED = "PASSED"
    FAILED = "FAILED"
    INCONCLUSIVE = "INCONCLUSIVE"


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


class CurvePoint(Document):
    """One look at a training run."""

    step: int
    loss: float
    held_out: dict[str, float] = Field(default_factory=dict)
    """Figures on the held-out split at this step, e.g. `kl`, `accuracy`, `flips`."""


class StageRecord(Document):
    """What one stage did. A stage that touched nothing fails instead of writing one."""

    method: str
    arguments: dict[str, Any]
    version: int
    """The stage's VERSION: part of its cache key."""
    touched: tuple[str, ...]
    """Names of the tensors or modules that it changed."""
    kept_float: tuple[str, ...] = ()
    """For quantization: operators of the runtime's optimised graph that still compute in float."""
    before: dict[str, float] = Field(default_factory=dict)
    """Figures on the held-out split before the stage."""
    after: dict[str, float] = Field(default_factory=dict)
    curve: tuple[CurvePoint, ...] = ()
    details: dict[str, Any] = Field(default_factory=dict)
    """Facts of this method, e.g. `parameters_before`, `max_abs_logit_difference`."""
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    measured_by: str = ""
    """The conversion that ran the stage; another one's name means a cache hit."""


class ClassQuality(Document):
    label: str
    precision: float | None
    recall: float | None
    f1: float | None
    support: int


class QualityReport(Document):
    """One stored model on one dataset, in its target runtime."""

    runtime: str
    """e.g. `onnxruntime 1.32.0 CPUExecutionProvider`."""
    dataset: str
    """Digest of the dataset."""
    accuracy: Metric
    f1_macro: Metric
    per_class: tuple[ClassQuality, ...]
    labels: tuple[str, ...]
    confusion: tuple[tuple[int, ...], ...]
    """Rows: true label; columns: predicted label; both in the order of `labels`."""
    truncated: int
    """Examples cut at the maximum length."""
    measured_by: str = ""
    """The conversion that measured it."""
    warnings: tuple[str, ...] = ()


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


class LatencyRow(Document):
    """One shape, baseline and candidate timed in turn."""

    batch_size: int
    sequence_length: int
    repeats: int
    threads: int
    baseline_median_ms: float
    baseline_p95_ms: float
    candidate_median_ms: float
    candidate_p95_ms: float
    speedup: float
    """Median over the pairs of baseline time / candidate time."""
    speedup_interval: Interval
    """Order-statistic interval of that median."""


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


class EvaluationReport(Document):
    baseline: QualityReport
    candidate: QualityReport
    paired: PairedCounts
    accuracy_drop: Metric
    """Paired difference, baseline minus candidate."""
    footprint: Footprint
    latency: tuple[LatencyRow, ...]
    latency_measured_by: str = ""
    parity: ParityReport


class Histogram(Document):
    """counts[i] is the number of values in [edges[i], edges[i+1])."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


class DriftExample(Document):
    index: int
    """Position in the probe dataset, from 0. The text itself is not copied into the report."""
    baseline_label: str
    candidate_label: str
    kl: float


class DriftReport(Document):
    """How far the candidate's answers moved from the baseline's on the probes, labels or not."""

    probes: str
    """Digest of the probe dataset."""
    n: int
    flips: int
    flip_share: Metric
    kl_mean: Metric
    kl_p99: Metric
    kl_histogram: Histogram
    """Of log10(KL), clipped to [-8, 1]."""
    largest: tuple[DriftExample, ...] = ()


class GateResult(Document):
    name: str
    outcome: Outcome
    figure: float | None
    bound: float
    comparison: Literal["<=", ">="]
    unit: str
    interval: Interval | None = None
    sentence: str
    """For people: the figure, the bound and why the outcome follows."""
    examples_needed: int | None = None
    """Where inconclusive: how many examples would tell, at the rates seen."""


class GateDecision(Document):
    verdict: Verdict
    gates: tuple[GateResult, ...]
    not_applied: tuple[str, ...]
    """Known gates that the policy leaves out."""


@dataclass(frozen=True)
class Measured:
    """Everything that a gate may look at. A part that the recipe does not call for is None."""

    merge: MergeReport | None = None
    evaluation: EvaluationReport | None = None
    drift: DriftReport | None = None


class Input(Document):
    role: str
    """`base`, `adapter NAME`, `model NAME`, `train`, `validation`, `evaluation` or `probes`."""
    digest: str
    size_bytes: int
    weight: float | None = None
    """Of an adapter or model in the merge."""


class Environment(Document):
    """Where the conversion ran: what must be equal for equal bytes."""

    versions: dict[str, str]
    device: str
    """`cpu` or the CUDA device's name."""
    cpu_capability: str
    threads: int
    isolation: str
    """What keeps the worker away from the signing key, or that nothing does."""


class Report(Document):
    schema_version: int = SCHEMA_VERSION
    conversion: str
    created: str
    """RFC 3339, UTC."""
    requested_by: str
    labels: dict[str, str]
    inputs: tuple[Input, ...]
    model_digest: str
    """Digest of the manifest of `model/`."""
    recipe_digest: str
    """Digest of recipe.yaml, byte for byte."""
    policy_digest: str
    seed: int
    stages: tuple[StageRecord, ...]
    merge: MergeReport | None = None
    """Where the recipe merges."""
    evaluation: EvaluationReport | None
    """None for a recipe that only merges."""
    drift: DriftReport | None
    """None for a recipe that only merges."""
    decision: GateDecision
    environment: Environment
    reused_from: str | None = None
    """The conversion whose every figure this report repeats, when the whole conversion was a cache hit."""
    warnings: tuple[str, ...] = ()
    seconds: float = Field(ge=0)

    @property
    def measured(self) -> Measured:
        """What the decision is made from."""
        return Measured(self.merge, self.evaluation, self.drift)
