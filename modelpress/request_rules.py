"""What must hold of a request: pure checks of its values and between its parts, each one sentence with field and cure.

The client makes them before anything is sent, the server for every request that arrives: the same sentences on both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from modelpress.errors import InvalidRecipe, InvalidRequest
from modelpress.recipes import MergeLora, Recipe

MAX_SEED = 2**31 - 1
MAX_PRIORITY = 100
MAX_DURATION_S = 315_576_000_000.0
"""10,000 years: the range of google.protobuf.Duration."""
MAX_ADAPTERS = 64
MAX_LABELS = 64
MAX_LABEL_VALUE_CHARACTERS = 255

_ADAPTER_NAME = re.compile(r"[a-z0-9_-]{1,63}")
_LABEL_KEY = re.compile(r"[a-z0-9_./-]{1,63}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters, line separators, and what turns the direction of text: a label is what it looks like."""


def check_inputs(recipe: Recipe, adapters: Sequence[str], *, train: bool, validation: bool) -> None:
    """Recipe and inputs fit together. `adapters`: their names; `train`, `validation`: whether the dataset is there."""
    _check_names(adapters)
    _check_adapters(recipe, adapters)
    _check_training_data(recipe, train=train, validation=validation)


def check_order(*, seed: int, priority: int) -> None:
    """Both are in their ranges."""
    _check_range("seed", seed, 0, MAX_SEED)
    _check_range("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)


def check_adapter(name: str, weight: float) -> None:
    """The name has a name's shape, the weight is finite and not 0."""
    if not _ADAPTER_NAME.fullmatch(name):
        raise InvalidRequest(
            f"adapter name {name[:80]!r} is not 1 to 63 of a-z, 0-9, '-', '_'", field="inputs.adapters.name"
        )
    if not math.isfinite(weight) or weight == 0:
        raise InvalidRequest(
            f"adapter {name!r} has weight {weight}: use a finite number other than 0", field="inputs.adapters.weight"
        )


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


def _check_names(names: Sequence[str]) -> None:
    """Adapters' names are unique."""
    if len(names) > MAX_ADAPTERS:
        raise InvalidRequest(f"{len(names)} adapters: at most {MAX_ADAPTERS} are allowed", field="inputs.adapters")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise InvalidRequest(f"two adapters are named {twice!r}: give each its own name", field="inputs.adapters.name")


def _check_adapters(recipe: Recipe, names: Sequence[str]) -> None:
    """Every adapter is merged, and every adapter that the recipe merges is there."""
    merge = next((stage for stage in recipe.stages if isinstance(stage, MergeLora)), None)
    if merge is None:
        if names:
            raise InvalidRecipe(
                f"no stage merges the adapters {', '.join(names)}: put `- method: merge_lora` first in the recipe",
                field="recipe.stages",
                reason="ADAPTER_NOT_MERGED",
            )
        return
    if not names:
        raise InvalidRequest(
            "inputs.adapters is empty, and recipe.stages[0] is 'merge_lora': name an adapter, or leave the stage out",
            field="inputs.adapters",
            reason="ADAPTER_MISSING",
        )
    unknown = next((name for name in merge.adapters if name not in names), None)
    if unknown:
        raise InvalidRecipe(
            f"recipe.stages[0].adapters: no adapter {unknown!r} in the request; it has {', '.join(names)}",
            field="recipe.stages[0].adapters",
            reason="ADAPTER_MISSING",
        )
    unused = next((name for name in names if merge.adapters and name not in merge.adapters), None)
    if unused:
        raise InvalidRecipe(
            f"no stage merges the adapter {unused!r}: add it to recipe.stages[0].adapters, or leave it out",
            field="recipe.stages[0].adapters",
            reason="ADAPTER_NOT_MERGED",
        )


def _check_training_data(recipe: Recipe, *, train: bool, validation: bool) -> None:
    """Stages that read training data have some, e.g. QAT."""
    readers = recipe.needs_training_data
    if readers and not train:
        raise InvalidRequest(
            f"inputs.train is required: the recipe's {', '.join(dict.fromkeys(readers))} reads training data",
            field="inputs.train",
            reason="TRAINING_DATA_MISSING",
        )
    if validation and not train:
        raise InvalidRequest(
            "inputs.validation is set and inputs.train is not: held-out data serves stages that train",
            field="inputs.validation",
        )
