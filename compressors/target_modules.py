"""Which modules of a model PEFT puts an adapter on: the rules of its configuration, without PEFT.

PEFT 0.21, tuners_utils.check_target_module_exists; a test compares the two on many names. A configuration's patterns
are regular expressions of whoever made it: they are run in worker processes only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from modelpress.documents import Document

Names = tuple[str, ...] | str | None
Expression = tuple[str, str, str]
"""A setting, what stands there, and the whole regular expression that it is run as."""


class Targeting(Document):
    """PEFT's fields of that name. A string is one regular expression, a sequence holds names or their ends."""

    target_modules: Names
    exclude_modules: Names = None
    modules_to_save: tuple[str, ...] | None = None
    layers_to_transform: tuple[int, ...] | int | None = None
    layers_pattern: Names = None

    def targets(self, module: str) -> bool:
        """Whether the adapter is on this module, if the module is of a kind that it can be on."""
        if self.exclude_modules and _matches(self.exclude_modules, module):
            return False
        if any(re.match(_saved(name), module) for name in self.modules_to_save or ()):
            return False
        if not self.target_modules or not _matches(self.target_modules, module):
            return False
        if isinstance(self.target_modules, str) or module in self.target_modules:
            return True
        return self._is_in_layers(module)

    def _is_in_layers(self, module: str) -> bool:
        layers = self.layers_to_transform
        if layers is None or layers == ():
            return True
        places = [_after(name) for name in _as_tuple(self.layers_pattern)] or [r".*?\.[^.]*\.(?P<index>\d+)\."]
        found = next((match for match in (re.match(place, module) for place in places) if match), None)
        index = int(found["index"]) if found and found["index"] else None
        return index == layers if isinstance(layers, int) else index in layers


def expressions(settings: Targeting, patterns: Mapping[str, Iterable[str]]) -> Iterator[Expression]:
    """Every regular expression that these rules run. `patterns`: the keys of `rank_pattern` and `alpha_pattern`."""
    yield from ((setting, key, _ending(key)) for setting, keys in patterns.items() for key in keys)
    yield from (("modules_to_save", name, _saved(name)) for name in settings.modules_to_save or ())
    yield from (("layers_pattern", name, _after(name)) for name in _as_tuple(settings.layers_pattern))
    for setting in ("target_modules", "exclude_modules"):
        if isinstance(value := getattr(settings, setting), str):
            yield setting, value, value


def matching_key(patterns: Mapping[str, Any], target: str) -> str:
    """The first pattern that matches the end of the target's name, as PEFT looks up ranks and alphas."""
    return next((key for key in patterns if _compiled(_ending(key)).match(target)), target)


@lru_cache(maxsize=1 << 16)
def _compiled(expression: str) -> re.Pattern[str]:
    """An adapter with a rank for every layer has thousands: `re` itself keeps 512, and compiles more every time."""
    return re.compile(expression)


def _ending(key: str) -> str:
    return rf"(.*\.)?({key})$"


def _saved(name: str) -> str:
    return rf"(^|.*\.){name}($|\..*)"


def _after(name: str) -> str:
    """Where a module's name gives its layer's number: after this name."""
    return rf"(?:^|.*?\.){name}\.(?P<index>\d+)\."


def _as_tuple(names: Names) -> tuple[str, ...]:
    """Without empty names."""
    return tuple(filter(None, (names,) if isinstance(names, str) else names or ()))


def _matches(names: Sequence[str], module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)
