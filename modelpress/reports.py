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
from modelpress.language_reports import LanguageReport
from modelpress.merge_reports import MergeReport
from modelpress.metrics import Footprint, Interval, Metric, PairedCounts, ParityReport
from modelpress.quantization_reports import QuantizedLayer

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
    layers: tuple[QuantizedLayer, ...] = ()
    """For quantization of weights: every linear layer of the decoder layers, in the model's order."""
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


class Cluster(Document):
    """Examples that are not independent of each other: the tokens of one window."""

    n: int
    flips: int


class DriftExample(Document):
    index: int
    """Position in the probe dataset, from 0; of a language model, among the predicted tokens. The text itself is not
    copied into the report."""
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
    clusters: tuple[Cluster, ...] = ()
    """Of a language model, whose examples are tokens: the windows that they stand in. Empty: all are independent."""


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
    language: LanguageReport | None = None

    @property
    def footprint(self) -> Footprint | None:
        part = self.evaluation or self.language
        return part.footprint if part else None

    @property
    def paired(self) -> PairedCounts | None:
        """Who is right where: of a classifier's examples, or of a language model's questions."""
        if self.evaluation:
            return self.evaluation.paired
        return self.language.choices.paired if self.language and self.language.choices else None

    @property
    def parity(self) -> ParityReport | None:
        part = self.evaluation or self.language
        return part.parity if part else None


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
    """Of a classifier; None for a recipe that only merges."""
    language: LanguageReport | None = None
    """Of a language model; None for a recipe that only merges."""
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
        return Measured(self.merge, self.evaluation, self.drift, self.language)
