"""The request for a conversion as one frozen value, valid once built.

    ConversionRequest.from_json(request.to_json()) == request

What needs the store or the artifacts' facts (does the adapter fit the base?) is `service.preflight`'s question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from modelpress.canonical import canonical_json
from modelpress.digests import Digest, digest_bytes
from modelpress.errors import InvalidRequest
from modelpress.evaluations import AnyEvaluation, default_evaluation, read_evaluation
from modelpress.policies import Policy, read_policy
from modelpress.recipes import Recipe, read_recipe
from modelpress.request_rules import (
    Given,
    check_adapter,
    check_inputs,
    check_labels,
    check_model,
    check_order,
)
from modelpress.requests import Limits
from modelpress.task_rules import check_task

ParsedT = TypeVar("ParsedT")


@dataclass(frozen=True)
class AdapterRequest:
    """An adapter, the recipe's name for it and its finite, non-zero weight in the merge."""

    name: str
    artifact: Digest
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_adapter(self.name, self.weight)


@dataclass(frozen=True)
class ModelRequest:
    """A further model, the recipe's name for it and its finite weight in the merge."""

    name: str
    artifact: Digest
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_model(self.name, self.weight)


@dataclass(frozen=True)
class ConversionRequest:
    """Everything that decides a conversion's result, and its limits, labels and priority.

    Raises InvalidRequest, InvalidRecipe or InvalidPolicy on a part that cannot be, and on parts that exclude each
    other, e.g. adapters that no stage merges.
    """

    base: Digest
    recipe_yaml: str
    policy_yaml: str
    evaluation_dataset: Digest | None = None
    """None exactly where the recipe only merges."""
    evaluation_yaml: str = ""
    adapters: tuple[AdapterRequest, ...] = ()
    models: tuple[ModelRequest, ...] = ()
    train: Digest | None = None
    validation: Digest | None = None
    probes: Digest | None = None
    limits: Limits = field(default_factory=Limits)
    labels: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    priority: int = 0

    def __post_init__(self) -> None:
        check_order(seed=self.seed, priority=self.priority)
        check_labels(self.labels)
        _ = self.policy  # parsed now, so that a request that exists has three valid texts
        check_task(self.recipe, self.evaluation.task)
        check_inputs(self.recipe, self._given)

    @property
    def datasets(self) -> Mapping[str, Digest]:
        """Those of train, validation, evaluation and probes that the request has."""
        roles = {"train": self.train, "validation": self.validation}
        roles |= {"evaluation": self.evaluation_dataset, "probes": self.probes}
        return {role: digest for role, digest in roles.items() if digest is not None}

    @property
    def artifacts(self) -> tuple[Digest, ...]:
        """Every artifact that the request names, each once."""
        merged = (*(adapter.artifact for adapter in self.adapters), *(model.artifact for model in self.models))
        return tuple(dict.fromkeys((self.base, *merged, *self.datasets.values())))

    @property
    def _given(self) -> Given:
        return Given(
            adapters=tuple(adapter.name for adapter in self.adapters),
            models=tuple((model.name, model.weight) for model in self.models),
            datasets=frozenset(self.datasets),
            has_evaluation_document=bool(self.evaluation_yaml.strip()),
            task=self.evaluation.task,
        )

    @cached_property
    def recipe(self) -> Recipe:
        return _parse(read_recipe, self.recipe_yaml, "recipe")

    @cached_property
    def evaluation(self) -> AnyEvaluation:
        """How to measure; an empty text stands for the defaults of the recipe's task."""
        if not self.evaluation_yaml.strip():
            return default_evaluation(self.recipe)
        return _parse(read_evaluation, self.evaluation_yaml, "evaluation")

    @cached_property
    def policy(self) -> Policy:
        return _parse(read_policy, self.policy_yaml, "policy")

    @cached_property
    def digest(self) -> Digest:
        """Names the request: two bodies under one `request_id` are equal when their digests are."""
        return digest_bytes(canonical_json(self.to_json()))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values: the `conversions.request` column. The three texts stand in it byte for byte."""
        return {
            "base": str(self.base),
            "adapters": _merged_to_json(self.adapters),
            "models": _merged_to_json(self.models),
            "train": _text(self.train),
            "validation": _text(self.validation),
            "evaluation_dataset": _text(self.evaluation_dataset),
            "probes": _text(self.probes),
            "recipe_yaml": self.recipe_yaml,
            "evaluation_yaml": self.evaluation_yaml,
            "policy_yaml": self.policy_yaml,
            "limits": asdict(self.limits),
            "labels": dict(self.labels),
            "seed": self.seed,
            "priority": self.priority,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> ConversionRequest:
        """The inverse of `to_json`; reads what was stored before there were models, too."""
        return ConversionRequest(
            base=Digest(value["base"]),
            adapters=tuple(AdapterRequest(a["name"], Digest(a["artifact"]), a["weight"]) for a in value["adapters"]),
            models=tuple(ModelRequest(m["name"], Digest(m["artifact"]), m["weight"]) for m in value.get("models", ())),
            train=_digest(value["train"]),
            validation=_digest(value["validation"]),
            evaluation_dataset=_digest(value["evaluation_dataset"]),
            probes=_digest(value["probes"]),
            recipe_yaml=value["recipe_yaml"],
            evaluation_yaml=value["evaluation_yaml"],
            policy_yaml=value["policy_yaml"],
            limits=Limits(**value["limits"]),
            labels=value["labels"],
            seed=value["seed"],
            priority=value["priority"],
        )


def _merged_to_json(merged: Sequence[AdapterRequest | ModelRequest]) -> list[dict[str, Any]]:
    return [{"name": one.name, "artifact": str(one.artifact), "weight": one.weight} for one in merged]


def _text(digest: Digest | None) -> str | None:
    return str(digest) if digest else None


def _digest(text: str | None) -> Digest | None:
    return Digest(text) if text else None


def _parse(read: Callable[[str], ParsedT], text: str, field: str) -> ParsedT:
    """Read one of the request's texts; a fault's path starts with the request's field."""
    try:
        return read(text)
    except InvalidRequest as fault:
        path = f"{field}.{fault.field}" if fault.field else field
        sentence = f"{field}.{fault.message}" if fault.field else f"{field}: {fault.message}"
        raise type(fault)(sentence, reason=fault.reason, field=path, metadata=fault.metadata) from None
