"""What every compressor is given, and what it may say while it runs.

A compressor is one function, `run(arguments, job, monitor) -> StageRecord`, and one integer `VERSION` that its
cache key holds. It reads `job.model`, writes the complete new model folder (weights, config, tokenizer, every
companion file) to the empty `job.output`, and leaves everything else alone. Equal inputs, seed, device kind and
thread count give equal bytes.

A stage that is only arithmetic on files gets a `StreamJob` instead: it reads its inputs where they are stored and
writes its output where it will be stored, file by file, without a copy of the model on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from modelpress.datasets import LabelledTexts
from modelpress.stored_folders import Sink, Source


@dataclass(frozen=True)
class Data:
    """Training rows and the held-out rows that no training step sees; `provenance` says how they were split."""

    train: LabelledTexts
    held_out: LabelledTexts
    provenance: str


@dataclass(frozen=True)
class Job:
    """One stage's inputs. Folders are the worker's own copies."""

    model: Path
    output: Path
    seed: int
    device: str = "cpu"
    threads: int = 1
    teacher: Path | None = None
    """The merged, unpruned model: what `recover` and `quantize` distil from."""
    evidence: Path | None = None
    """An empty folder for what proves the stage but does not ship, e.g. the export's parity reference."""
    data: Data | None = None


@dataclass(frozen=True)
class NamedSource:
    """An adapter or a model that is merged: its name in the request and its weight."""

    name: str
    source: Source
    weight: float = 1.0


@dataclass(frozen=True)
class StreamJob:
    """One streaming stage's inputs and output. A merge computes on one thread, on the CPU whatever the device: it waits
    for the disk and for hashes, and reading and writing have the other cores.
    """

    base: Source
    sink: Sink
    seed: int
    merged: tuple[NamedSource, ...] = ()
    """The adapters or models of the stage, in its order."""
    work: WorkPlace | None = None
    """What a stage needs that computes more than a merge does."""


@dataclass(frozen=True)
class WorkPlace:
    """Where a streaming stage computes. `scratch` is empty private space on disk, deleted afterwards."""

    scratch: Path
    device: str = "cpu"
    threads: int = 1
    calibration: Calibration | None = None


@dataclass(frozen=True)
class Calibration:
    """The training dataset and its column of texts; `tokenizer` is a local copy of the base's folder without weights
    or with them.
    """

    dataset: Path
    digest: str
    text_column: str
    tokenizer: Path


@dataclass(frozen=True)
class Progress:
    """What people see while a stage runs. `loss` is None where nothing is trained."""

    step: int
    steps: int
    loss: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)


class Monitor(Protocol):
    """The line to the service. Cancelling needs no call: the worker process is ended."""

    def progress(self, progress: Progress) -> None: ...

    def save_checkpoint(self, step: int, write: Callable[[Path], None]) -> None:
        """Make the checkpoint that `write` puts into an empty folder durable; it replaces the former one."""

    def checkpoint(self) -> Path | None:
        """The folder of the newest checkpoint of this very stage, where an earlier attempt left one."""


class SilentMonitor:
    """A monitor that keeps nothing: for tests and for use as a library."""

    def progress(self, progress: Progress) -> None:
        pass

    def save_checkpoint(self, step: int, write: Callable[[Path], None]) -> None:
        pass

    def checkpoint(self) -> Path | None:
        return None
