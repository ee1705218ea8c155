"""Why a conversion failed: whose fault it is and what helps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from modelpress.errors import FailedPrecondition, InvalidRequest, ModelpressError, NotFound, OverLimit


class FailureKind(str, Enum):
    """The names stand on the wire with the prefix FAILURE_KIND_."""

    REJECTED_AT_PREFLIGHT = "REJECTED_AT_PREFLIGHT"
    NO_CAPACITY = "NO_CAPACITY"
    TIMED_OUT_IN_QUEUE = "TIMED_OUT_IN_QUEUE"
    TIMED_OUT_RUNNING = "TIMED_OUT_RUNNING"
    INVALID_INPUT = "INVALID_INPUT"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    INTERNAL = "INTERNAL"


NEXT_ACTION: Mapping[FailureKind, str] = {
    FailureKind.REJECTED_AT_PREFLIGHT: "Change the request as the message says and create a new conversion.",
    FailureKind.NO_CAPACITY: "Ask for less, or use a server with more memory or another device.",
    FailureKind.TIMED_OUT_IN_QUEUE: "Create it again with a longer limits.queue_timeout, or when the queue is shorter.",
    FailureKind.TIMED_OUT_RUNNING: "Create it again with a longer limits.run_timeout; finished steps are in the cache.",
    FailureKind.INVALID_INPUT: "Change the input that the message names and create a new conversion.",
    FailureKind.OUT_OF_MEMORY: "Create it again with a higher limits.memory_limit_bytes, or a smaller batch or window.",
    FailureKind.INTERNAL: "Retry it: finished steps are kept. Report it where it fails again.",
}


class OutOfMemory(OverLimit):
    """A worker needed more memory than the conversion's limit."""

    reason = "OUT_OF_MEMORY"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"it needed more than limits.memory_limit_bytes ({limit_bytes} bytes, the worker's libraries included): "
            "raise the limit, or lower batch_size, max_length, window or sequence_length of stages and evaluation",
            field="limits.memory_limit_bytes",
        )


KINDS: Mapping[type[ModelpressError], FailureKind] = {
    InvalidRequest: FailureKind.INVALID_INPUT,
    NotFound: FailureKind.INVALID_INPUT,
    FailedPrecondition: FailureKind.INVALID_INPUT,
    OutOfMemory: FailureKind.OUT_OF_MEMORY,
    OverLimit: FailureKind.NO_CAPACITY,
    ModelpressError: FailureKind.INTERNAL,
}
"""The first row that an error is an instance of decides; every error is an instance of the last."""


@dataclass(frozen=True)
class Failure:
    """`reason` is stable and UPPER_SNAKE_CASE, `message` one sentence with field, value and cure."""

    kind: FailureKind
    reason: str
    message: str
    step: str = ""

    @property
    def next_action(self) -> str:
        return NEXT_ACTION[self.kind]

    def to_json(self) -> dict[str, str]:
        return {
            "kind": self.kind.value,
            "reason": self.reason,
            "message": self.message,
            "step": self.step,
            "next_action": self.next_action,
        }


def failure_of(error: ModelpressError, *, step: str) -> Failure:
    """The failure of a conversion whose `step` raised `error`."""
    kind = next(kind for error_type, kind in KINDS.items() if isinstance(error, error_type))
    return Failure(kind, error.reason, error.message, step)
