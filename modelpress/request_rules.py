"""What must hold of a request: pure checks of its values and between its parts, each one sentence with field and cure.

The client makes them before anything is sent, the server for every request that arrives: the same sentences on both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from modelpress.errors import InvalidRecipe, InvalidRequest
from modelpress.merge_recipes import MergeModels
from modelpress.recipes import Recipe
from modelpress.task_rules import EVALUATION_DATA, LANGUAGE_TASK

MAX_SEED = 2**31 - 1
MAX_PRIORITY = 100
MAX_DURATION_S = 315_576_000_000.0
"""10,000 years: the range of google.protobuf.Duration."""
MAX_MERGED = 64
MAX_LABELS = 64
MAX_LABEL_VALUE_CHARACTERS = 255

_NAME = re.compile(r"[a-z0-9_-]{1,63}")
_LABEL_KEY = re.compile(r"[a-z0-9_./-]{1,63}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters, line separators, and what turns the direction of text: a label is what it looks like."""


@dataclass(frozen=True)
class Given:
    """What a request brings to its recipe."""

    adapters: tuple[str, ...] = ()
    """Names, in the request's order."""
    models: tuple[tuple[str, float], ...] = ()
    """Name and weight of each."""
    datasets: frozenset[str] = frozenset()
    """Those of train, validation, evaluation and probes that are there."""
    has_evaluation_document: bool = False
    """Whether the evaluation is written out, not left to its defaults."""
    task: str = "text-classification"
    """The evaluation's."""


@dataclass(frozen=True)
class _Kind:
    """The words for one kind of what is merged: in sentences, fields and reasons."""

    one: str
    method: str
    missing: str
    not_merged: str

    @property
    def many(self) -> str:
        """Also the name of the field of the request's inputs, and of the stage's."""
        return f"{self.one}s"


ADAPTERS = _Kind("adapter", "merge_lora", missing="ADAPTER_MISSING", not_merged="ADAPTER_NOT_MERGED")
MODELS = _Kind("model", "merge_models", missing="MODEL_MISSING", not_merged="MODEL_NOT_MERGED")


def check_inputs(recipe: Recipe, given: Given) -> None:
    """Recipe and inputs fit together: everything that is given is read, and everything that is read is given."""
    for kind, names in ((ADAPTERS, given.adapters), (MODELS, tuple(name for name, _ in given.models))):
        _check_names(kind, names)
        _check_merged(recipe, kind, names)
    _check_model_weights(recipe, given.models)
    _check_datasets(recipe, given)
    _check_training_data(recipe, given)


def check_order(*, seed: int, priority: int) -> None:
    """Both are in their ranges."""
    _check_range("seed", seed, 0, MAX_SEED)
    _check_range("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)


def check_adapter(name: str, weight: float) -> None:
    """The name has a name's shape, the weight is finite and not 0."""
    _check_name(ADAPTERS, name)
    if not math.isfinite(weight) or weight == 0:
        _refuse_weight(ADAPTERS, name, weight, "a finite number other than 0")


def check_model(name: str, weight: float) -> None:
    """The name has a name's shape, the weight is finite; whether it may be 0 is the merge method's."""
    _check_name(MODELS, name)
    if not math.isfinite(weight):
        _refuse_weight(MODELS, name, weight, "a finite number")


def check_timeout(name: str, seconds: float | None) -> None:
    """`name`: queue_timeout or run_timeout."""
    if seconds is not None and not 0 < seconds <= MAX_DURATION_S:
        raise InvalidRequest(
            f"limits.{name} is {seconds:g} s: use a positive duration, or leave it unset", field=f"limits.{name}"
        )


def check_memory_limit(size_bytes: int | None) -> None:
    if size_bytes is not None and size_bytes <= 0:
        raise InvalidRequest(
            f"limits.memory_limit_bytes is {size_bytes}: use a positive number, or leave it unset",
            field="limits.memory_limit_bytes",
        )


def check_label_count(count: int) -> None:
    """Of a conversion, and of a filter: each label is one more condition for the database."""
    if count > MAX_LABELS:
        raise InvalidRequest(f"{count} labels: at most {MAX_LABELS} are allowed", field="labels")


def check_labels(labels: Mapping[str, str]) -> None:
    check_label_count(len(labels))
    for key, value in labels.items():
        if not _LABEL_KEY.fullmatch(key):
            raise InvalidRequest(
                f"label key {key[:80]!r} is not 1 to 63 of a-z, 0-9, '-', '_', '.', '/'", field="labels"
            )
        if len(value) > MAX_LABEL_VALUE_CHARACTERS or _CONTROL.search(value):
            raise InvalidRequest(
                f"label {key!r} has control characters or more than {MAX_LABEL_VALUE_CHARACTERS} characters",
                field=f"labels.{key}",
            )


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}: it must be {low} to {high}", field=name)


def _check_name(kind: _Kind, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{kind.one} name {name[:80]!r} is not 1 to 63 of a-z, 0-9, '-', '_'", field=f"inputs.{kind.many}.name"
        )


def _refuse_weight(kind: _Kind, name: str, weight: float, wanted: str) -> NoReturn:
    raise InvalidRequest(f"{kind.one} {name!r} has weight {weight}: use {wanted}", field=f"inputs.{kind.many}.weight")


def _check_names(kind: _Kind, names: Sequence[str]) -> None:
    """Names of one kind are unique, and not too many."""
    field = f"inputs.{kind.many}"
    if len(names) > MAX_MERGED:
        raise InvalidRequest(f"{len(names)} {kind.many}: at most {MAX_MERGED} are allowed", field=field)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise InvalidRequest(f"two {kind.many} are named {twice!r}: give each its own name", field=f"{field}.name")


def _check_merged(recipe: Recipe, kind: _Kind, names: Sequence[str]) -> None:
    """Everything of this kind is merged, and everything that the recipe merges is there."""
    merge = recipe.merge
    if merge is None or merge.method != kind.method:
        if names:
            raise InvalidRecipe(
                f"no stage merges the {kind.many} {', '.join(names)}: put `- method: {kind.method}` first in the "
                "recipe",
                field="recipe.stages",
                reason=kind.not_merged,
            )
        return
    if not names:
        raise InvalidRequest(
            f"inputs.{kind.many} is empty, and recipe.stages[0] is {kind.method!r}: name one, or leave the stage out",
            field=f"inputs.{kind.many}",
            reason=kind.missing,
        )
    _check_named(kind, names, named=getattr(merge, kind.many))


def _check_named(kind: _Kind, names: Sequence[str], *, named: Sequence[str]) -> None:
    """The stage names what the request has, all of it; a stage that names nothing means everything."""
    field = f"recipe.stages[0].{kind.many}"
    unknown = next((name for name in named if name not in names), None)
    if unknown:
        raise InvalidRecipe(
            f"{field}: no {kind.one} {unknown!r} in the request; it has {', '.join(names)}",
            field=field,
            reason=kind.missing,
        )
    unused = next((name for name in names if named and name not in named), None)
    if unused:
        raise InvalidRecipe(
            f"no stage merges the {kind.one} {unused!r}: add it to {field}, or leave it out",
            field=field,
            reason=kind.not_merged,
        )


def _check_model_weights(recipe: Recipe, models: Sequence[tuple[str, float]]) -> None:
    """SLERP goes a part of the way to one model; elsewhere a weight of 0 would merge nothing."""
    if not isinstance(recipe.merge, MergeModels):
        return
    is_slerp = recipe.merge.merge_method == "slerp"
    if is_slerp and len(models) != 1:
        raise InvalidRequest(
            f"merge_method 'slerp' goes from the base to one model, and inputs.models has {len(models)}: give one, or "
            "use 'linear'",
            field="inputs.models",
        )
    for name, weight in models:
        if is_slerp and not 0 <= weight <= 1:
            _refuse_weight(MODELS, name, weight, "0 to 1, the way that 'slerp' goes from the base to the model")
        if not is_slerp and weight == 0:
            _refuse_weight(MODELS, name, weight, "a finite number other than 0")


def _check_datasets(recipe: Recipe, given: Given) -> None:
    """A recipe that only merges reads no dataset and no evaluation; every other one is judged on a dataset."""
    if recipe.is_merge_only:
        fields = [f"inputs.{role}" for role in sorted(given.datasets)]
        field = next(iter([*fields, *(["evaluation"] if given.has_evaluation_document else [])]), None)
        if field:
            raise InvalidRequest(
                f"{field} is set, and nothing reads it: the recipe only merges (export's format is 'safetensors'); "
                "leave it out",
                field=field,
                reason="INPUT_NOT_READ",
            )
    elif "evaluation" not in given.datasets:
        raise InvalidRequest(
            f"inputs.evaluation is required: name the {EVALUATION_DATA[given.task]} that the verdict is measured on "
            "(artifacts/sha256:<hex>); only a recipe that ends with export's format 'safetensors' needs none",
            field="inputs.evaluation",
            reason="EVALUATION_DATA_MISSING",
        )


def _check_training_data(recipe: Recipe, given: Given) -> None:
    """Stages that read training data have some, e.g. QAT; held-out data is given only where it is read."""
    readers = recipe.needs_training_data
    if readers and "train" not in given.datasets:
        raise InvalidRequest(
            f"inputs.train is required: the recipe's {', '.join(dict.fromkeys(readers))} reads training data",
            field="inputs.train",
            reason="TRAINING_DATA_MISSING",
        )
    if "validation" in given.datasets and given.task == LANGUAGE_TASK:
        raise InvalidRequest(
            "inputs.validation is set, and nothing reads it: the stages of a language model hold no data out; leave it "
            "out",
            field="inputs.validation",
            reason="INPUT_NOT_READ",
        )
    if "validation" in given.datasets and "train" not in given.datasets:
        raise InvalidRequest(
            "inputs.validation is set and inputs.train is not: held-out data serves stages that train",
            field="inputs.validation",
        )
