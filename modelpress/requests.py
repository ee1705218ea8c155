"""What is asked of the service: a conversion of named artifacts, valid once built.

    ConversionRequest(
        documents=Documents(recipe=recipe_yaml, policy=policy_yaml),
        base="artifacts/sha256:...",
        evaluation="artifacts/sha256:...",
    )

The documents are read with the same types as on the server, so most faults are found before anything is sent. A recipe
that only merges reads no dataset: leave `evaluation` out there, and only there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from modelpress.errors import InvalidRequest
from modelpress.evaluations import AnyEvaluation, default_evaluation, read_evaluation
from modelpress.gates import check_measurable
from modelpress.policies import Policy, read_policy
from modelpress.recipes import Recipe, read_recipe
from modelpress.request_rules import (
    Given,
    check_adapter,
    check_inputs,
    check_labels,
    check_memory_limit,
    check_model,
    check_order,
    check_timeout,
)
from modelpress.task_rules import check_task

ARTIFACT_NAME = re.compile(r"artifacts/sha256:[0-9a-f]{64}")
CONVERSION_NAME = re.compile(r"conversions/[A-Za-z0-9_-]{1,63}")


@dataclass(frozen=True)
class Documents:
    """Recipe, policy and evaluation as people wrote them; an empty evaluation means the defaults of the recipe's task.

    Every gate of the policy can be judged by what the recipe and the evaluation have measured.
    """

    recipe: str
    policy: str
    evaluation: str = ""

    def __post_init__(self) -> None:
        check_task(self.parsed_recipe, self.parsed_evaluation.task)
        check_measurable(self.parsed_policy, self.parsed_evaluation, self.parsed_recipe)

    @cached_property
    def parsed_recipe(self) -> Recipe:
        return read_recipe(self.recipe)

    @cached_property
    def parsed_policy(self) -> Policy:
        return read_policy(self.policy)

    @cached_property
    def parsed_evaluation(self) -> AnyEvaluation:
        given = self.evaluation.strip()
        return read_evaluation(self.evaluation) if given else default_evaluation(self.parsed_recipe)


@dataclass(frozen=True)
class AdapterInput:
    """An adapter by the name that the recipe calls it, and its weight in the merge."""

    name: str
    artifact: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_adapter(self.name, self.weight)


@dataclass(frozen=True)
class ModelInput:
    """A further model by the name that the recipe calls it, and its weight in the merge."""

    name: str
    artifact: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_model(self.name, self.weight)


@dataclass(frozen=True)
class Limits:
    """Seconds and bytes, all > 0. None: the server's default (for the queue: no limit)."""

    queue_timeout_s: float | None = None
    run_timeout_s: float | None = None
    memory_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        check_timeout("queue_timeout", self.queue_timeout_s)
        check_timeout("run_timeout", self.run_timeout_s)
        check_memory_limit(self.memory_limit_bytes)


@dataclass(frozen=True)
class ConversionRequest:
    """One model, one recipe, one policy. Empty names: no such input."""

    documents: Documents
    base: str
    evaluation: str = ""
    adapters: tuple[AdapterInput, ...] = ()
    models: tuple[ModelInput, ...] = ()
    train: str = ""
    validation: str = ""
    probes: str = ""
    limits: Limits = Limits()
    labels: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    priority: int = 0

    def __post_init__(self) -> None:
        check_order(seed=self.seed, priority=self.priority)
        check_labels(self.labels)
        datasets = {role: getattr(self, role) for role in ("train", "validation", "evaluation", "probes")}
        given = Given(
            adapters=tuple(adapter.name for adapter in self.adapters),
            models=tuple((model.name, model.weight) for model in self.models),
            datasets=frozenset(role for role, name in datasets.items() if name),
            has_evaluation_document=bool(self.documents.evaluation.strip()),
            task=self.documents.parsed_evaluation.task,
        )
        check_inputs(self.documents.parsed_recipe, given)
        _check_artifact("base", self.base)
        for where, name in datasets.items():
            if name:
                _check_artifact(where, name)
        for adapter in self.adapters:
            _check_artifact(f"adapters.{adapter.name}", adapter.artifact)
        for model in self.models:
            _check_artifact(f"models.{model.name}", model.artifact)


def _check_artifact(where: str, name: str) -> None:
    if not ARTIFACT_NAME.fullmatch(name):
        raise InvalidRequest(f"{where} is {name[:90]!r}: give an artifact's name, artifacts/sha256:<hex>", field=where)
