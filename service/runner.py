"""What the path hands from step to step: who runs the steps, and the immutable values between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from modelpress.digests import Digest
from modelpress.errors import InternalError
from modelpress.reports import Measured
from service.plan import Plan
from service.steps import Step, StepResult


class Runner(Protocol):
    """What runs steps: the desk of an attempt, or the preflight's look into the cache."""

    @property
    def memory_limit_bytes(self) -> int:
        """The worker's: what the request asks for, else the server's own."""

    def run(self, step: Step) -> StepResult: ...

    def run_paired(self, step: Step) -> StepResult:
        """As `run`, but measured anew unless every step so far came from the cache."""


@dataclass(frozen=True)
class Compressed:
    """The baseline and the compressed model as folders of safetensors, with what each stage recorded."""

    baseline: Digest
    model: Digest
    stages: tuple[StepResult, ...]


@dataclass(frozen=True)
class Candidate:
    """What would ship, what each stage recorded, and what was measured."""

    model: Digest
    stages: tuple[StepResult, ...]
    measured: Measured


def step_of(plan: Plan, name: str, operation: str, arguments: Mapping[str, Any], inputs: Mapping[str, Digest]) -> Step:
    return Step(name=name, operation=operation, arguments=arguments, inputs=inputs, seed=plan.request.seed)


def written(result: StepResult) -> Digest:
    """The folder that the step wrote."""
    if result.digest is None:
        raise InternalError("a step that must write a folder wrote none")
    return result.digest
