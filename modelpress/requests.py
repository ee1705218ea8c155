"""What is asked of the service: a conversion of named artifacts, valid once built.

    ConversionRequest(
        documents=Documents(recipe=recipe_yaml, policy=policy_yaml),
        base="artifacts/sha256:...",
        evaluation="artifacts/sha256:...",
    )

The documents are read with the same types as on the server, so most faults are found before anything is sent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from modelpress.errors import InvalidRequest
from modelpress.evaluations import Evaluation, read_evaluation
from modelpress.policies import Policy, read_policy
from modelpress.recipes import MergeLora, Recipe, read_recipe

ARTIFACT_NAME = re.compile(r"artifacts/sha256:[0-9a-f]{64}")
CONVERSION_NAME = re.compile(r"conversions/[A-Za-z0-9_-]{1,63}")
MAX_SEED = 2**31 - 1


@dataclass(frozen=True)
class Documents:
    """Recipe, policy and evaluation as people wrote them; an empty evaluation means the defaults."""

    recipe: str
    policy: str
    evaluation: str = ""

    def __post_init__(self) -> None:
        _ = self.parsed_recipe, self.parsed_policy, self.parsed_evaluation

    @cached_property
    def parsed_recipe(self) -> Recipe:
        return read_recipe(self.recipe)

    @cached_property
    def parsed_policy(self) -> Policy:
        return read_policy(self.policy)

    @cached_property
    def parsed_evaluation(self) -> Evaluation:
        return read_evaluation(self.evaluation) if self.evaluation.strip() else Evaluation()


@dataclass(frozen=True)
class AdapterInput:
    """An adapter by the name that the recipe calls it, and its weight in the merge."""

    name: str
    artifact: str
    weight: float = 1.0


@dataclass(frozen=True)
class Limits:
    """None: the server's default (for the queue: no limit)."""

    queue_timeout_s: float | None = None
    run_timeout_s: float | None = None
    memory_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value <= 0:
                raise InvalidRequest(f"{name} is {value}: it must be greater than 0", field=f"limits.{name}")


@dataclass(frozen=True)
class ConversionRequest:
    """One model, one recipe, one policy. Empty names: no such input."""

    documents: Documents
    base: str
    evaluation: str
    adapters: tuple[AdapterInput, ...] = ()
    train: str = ""
    validation: str = ""
    probes: str = ""
    limits: Limits = Limits()
    labels: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    priority: int = 0

    def __post_init__(self) -> None:
        check_inputs(self.documents.parsed_recipe, [adapter.name for adapter in self.adapters], train=self.train)
        if not 0 <= self.seed <= MAX_SEED:
            raise InvalidRequest(f"seed is {self.seed}: it must be from 0 to {MAX_SEED}", field="seed")
        names = {"base": self.base, "evaluation": self.evaluation}
        names |= {"train": self.train, "validation": self.validation, "probes": self.probes}
        names |= {f"adapters.{adapter.name}": adapter.artifact for adapter in self.adapters}
        for where, name in names.items():
            if (name or where in ("base", "evaluation")) and not ARTIFACT_NAME.fullmatch(name):
                raise InvalidRequest(
                    f"{where} is {name[:90]!r}: give an artifact's name, artifacts/sha256:<hex>", field=where
                )


def check_inputs(recipe: Recipe, adapters: Sequence[str], *, train: object) -> None:
    """Raise InvalidRequest where the recipe asks for an input that is not there, or an adapter is never used."""
    if recipe.needs_training_data and not train:
        stages = ", ".join(recipe.needs_training_data)
        raise InvalidRequest(f"the recipe's {stages} needs training data: give a train dataset", field="inputs.train")
    twice = next((name for name in adapters if adapters.count(name) > 1), None)
    if twice:
        raise InvalidRequest(f"two adapters are named {twice!r}: give each its own name", field="inputs.adapters")
    merge = next((stage for stage in recipe.stages if isinstance(stage, MergeLora)), None)
    if merge is None and adapters:
        raise InvalidRequest("an adapter is given, but the recipe has no merge_lora stage", field="inputs.adapters")
    if merge is not None and not adapters:
        raise InvalidRequest("the recipe has a merge_lora stage, but no adapter is given", field="inputs.adapters")
    unknown = next((name for name in merge.adapters if name not in adapters), None) if merge else None
    if unknown:
        raise InvalidRequest(
            f"the recipe merges adapter {unknown!r}, which is not given; given are {', '.join(adapters)}",
            field="inputs.adapters",
        )
