"""What a worker process is asked and what it answers.

An operation is `run(task) -> TaskResult` and a version. It reads copies of its inputs, `task.inputs`, or the store
itself, `task.stored`; it may write a result into the empty folder `task.output` or into the store itself, `task.sink`,
and what proves it into the empty folder `task.evidence`; it returns its figures. When it has returned, the process
stores what is in `output` or `sink` as a manifest, whose digest becomes `StepResult.digest`, and `evidence` (where not
empty) as a manifest, whose digest becomes `record["evidence"]`.

Between the processes travel JSON messages, one object with one key each, never pickles: a worker that a model has
taken over must not be able to run code in the service, which holds the signing key.

    service -> worker   run, saved
    worker -> service   ready, progress, checkpoint, done, failed
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from compressors.stages import Monitor, Progress
from modelpress.canonical import canonical_json
from modelpress.digests import Digest
from modelpress.errors import InternalError
from modelpress.stored_folders import Source
from service.steps import Step
from service.storage.stored_folders import StoreSink

MAX_MESSAGE_BYTES = 16 << 20
"""Records are figures; anything larger belongs into `output` or `evidence`."""


@dataclass(frozen=True)
class Task:
    """One step as its operation sees it. `folder` is private scratch space that is deleted afterwards."""

    step: Step
    folder: Path
    inputs: Mapping[str, Path]
    """Role -> folder, fetched from the store and verified when it is first asked for. Read only."""
    stored: Mapping[str, Source]
    """Role -> the same folder where it is stored."""
    output: Path
    sink: StoreSink
    """For results that are written file by file: used instead of `output`, never beside it."""
    evidence: Path
    device: str
    """`cpu` or `cuda`."""
    threads: int
    memory_limit_bytes: int
    """What the process may hold at most."""
    monitor: Monitor
    """`progress(Progress(done, total, loss, figures))`, `save_checkpoint(step, write)`, `checkpoint()`."""

    def progress(self, done: int, total: int) -> None:
        """What a measurement says: how much of its work is done."""
        self.monitor.progress(Progress(step=done, steps=total))


@dataclass(frozen=True)
class TaskResult:
    """`record` holds JSON values only; NaN and infinity are refused when it is sent."""

    record: Mapping[str, Any] = field(default_factory=dict)


class Operation(NamedTuple):
    """One row of `operations.OPERATIONS`. `version` is raised whenever the result may change: cache keys hold it."""

    run: Callable[[Task], TaskResult]
    version: int


def versions_of(operations: Mapping[str, Operation]) -> dict[str, int]:
    return {name: operation.version for name, operation in operations.items()}


def send(connection: Connection, kind: str, body: Mapping[str, Any]) -> None:
    """Send one message. Raises InternalError where it is larger than MAX_MESSAGE_BYTES."""
    data = canonical_json({kind: dict(body)})
    if len(data) > MAX_MESSAGE_BYTES:
        raise InternalError(f"a {kind!r} message has {len(data)} bytes, at most {MAX_MESSAGE_BYTES} are allowed")
    connection.send_bytes(data)


def receive(connection: Connection) -> tuple[str, dict[str, Any]]:
    """The next message as (kind, body). EOFError where the other side is gone, InternalError where it is garbled."""
    data = connection.recv_bytes(MAX_MESSAGE_BYTES)
    try:
        ((kind, body),) = json.loads(data).items()
        return str(kind), dict(body)
    except (ValueError, AttributeError, TypeError):
        raise InternalError("a worker sent a message that is not one JSON object with one key") from None


def step_to_json(step: Step) -> dict[str, Any]:
    return {
        "name": step.name,
        "operation": step.operation,
        "arguments": dict(step.arguments),
        "inputs": {role: str(digest) for role, digest in step.inputs.items()},
        "seed": step.seed,
    }


def step_from_json(value: Mapping[str, Any]) -> Step:
    return Step(
        name=value["name"],
        operation=value["operation"],
        arguments=value["arguments"],
        inputs={role: Digest(digest) for role, digest in value["inputs"].items()},
        seed=value["seed"],
    )
