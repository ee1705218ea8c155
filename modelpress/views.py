"""What the service answers, as frozen values. Times are aware UTC datetimes; units stand in the names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from modelpress.manifests import ArtifactKind, Manifest
from modelpress.reports import Outcome, Verdict


class ConversionState(str, Enum):
    """Where a conversion stands. UNKNOWN: a state of a newer server."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    CANCELLING = "CANCELLING"
    CANCELLED = "CANCELLED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    UNKNOWN = "UNKNOWN"


class FailureKind(str, Enum):
    """Whose fault a failure is. UNKNOWN: a kind of a newer server."""

    REJECTED_AT_PREFLIGHT = "REJECTED_AT_PREFLIGHT"
    NO_CAPACITY = "NO_CAPACITY"
    TIMED_OUT_IN_QUEUE = "TIMED_OUT_IN_QUEUE"
    TIMED_OUT_RUNNING = "TIMED_OUT_RUNNING"
    INVALID_INPUT = "INVALID_INPUT"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    INTERNAL = "INTERNAL"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True)
class Failure:
    """Why a conversion failed, at which step, and what to do next."""

    kind: FailureKind
    reason: str
    message: str
    step: str
    next_action: str


@dataclass(frozen=True)
class Progress:
    """Where a running conversion is. `total` 0 and None mean: not known."""

    step: str
    step_index: int
    step_count: int
    done: int
    total: int
    loss: float | None
    remaining_s: float | None


@dataclass(frozen=True)
class Estimate:
    """What the preflight expects."""

    storage_bytes: int
    memory_bytes: int
    candidate_bytes: int
    """Of the candidate's weights, as predicted from the base's shapes."""
    parameters: int
    steps: tuple[str, ...]
    cached_steps: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class ConversionInputs:
    """Names of artifacts; empty: no such input. `adapters` and `models` map the recipe's names to artifacts."""

    base: str
    adapters: Mapping[str, str]
    models: Mapping[str, str]
    train: str
    validation: str
    evaluation: str
    probes: str


@dataclass(frozen=True)
class Conversion:
    """A job. `verdict` and `output` are set when SUCCEEDED, `failure` when FAILED, `progress` while RUNNING."""

    name: str
    state: ConversionState
    inputs: ConversionInputs
    seed: int
    priority: int
    labels: Mapping[str, str]
    requested_by: str
    attempt: int
    create_time: datetime | None
    start_time: datetime | None
    end_time: datetime | None
    progress: Progress | None
    failure: Failure | None
    verdict: Verdict | None
    output: str
    reused_from: str
    etag: str
    last_sequence: int


@dataclass(frozen=True)
class StateChanged:
    state: ConversionState
    failure: Failure | None
    verdict: Verdict | None


@dataclass(frozen=True)
class StepStarted:
    step: str
    step_index: int
    step_count: int


@dataclass(frozen=True)
class StepFinished:
    """`seconds` is 0 for a cache hit; `digest` is empty where a step has figures only."""

    step: str
    seconds: float
    cached: bool
    digest: str
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Warned:
    """Something that a person should know."""

    message: str


@dataclass(frozen=True)
class Event:
    """One thing that happened to a conversion. `body` is None for a kind of event of a newer server."""

    sequence: int
    time: datetime
    body: StateChanged | StepStarted | Progress | StepFinished | Warned | None


@dataclass(frozen=True)
class Gate:
    """One gate of the policy with its figure, bound and interval, in `unit`."""

    name: str
    outcome: Outcome
    figure: float | None
    comparison: str
    bound: float
    unit: str
    interval_low: float | None
    interval_high: float | None
    confidence: float | None
    sentence: str
    examples_needed: int | None


@dataclass(frozen=True)
class ReportSummary:
    """The verdict and what it rests on."""

    name: str
    verdict: Verdict
    gates: tuple[Gate, ...]


@dataclass(frozen=True)
class Artifact:
    """A named, immutable set of files."""

    name: str
    kind: ArtifactKind
    manifest: Manifest
    create_time: datetime | None


@dataclass(frozen=True)
class ServerCapabilities:
    """What a server can do, its limits, and the public key that its signatures verify with."""

    version: str
    methods: tuple[str, ...]
    families: tuple[str, ...]
    formats: tuple[str, ...]
    tasks: tuple[str, ...]
    runtimes: tuple[str, ...]
    devices: tuple[str, ...]
    max_chunk_bytes: int
    max_blob_bytes: int
    worker_slots: int
    worker_threads: int
    default_run_timeout_s: float
    default_memory_limit_bytes: int
    public_key_pem: str
    development_key: bool


@dataclass(frozen=True)
class TransferProgress:
    """Bytes that have moved, of all that must. May fall back after a cut, to what the other side really holds."""

    done_bytes: int
    total_bytes: int
