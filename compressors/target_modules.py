"""Which modules of a model PEFT puts an adapter on: the rules of its configuration, without PEFT.

PEFT 0.21, tuners_utils.check_target_module_exists; a test compares the two on many names. A configuration's patterns
are regular expressions of whoever made it: they are run in worker processes only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from modelpress.documents import Document

Names = tuple[str, ...] | str | None


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
        if any(re.match(rf"(^|.*\.){name}($|\..*)", module) for name in self.modules_to_save or ()):
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
        found = next((match for match in (re.match(p, module) for p in self._layer_patterns()) if match), None)
        index = int(found["index"]) if found else None
        return index == layers if isinstance(layers, int) else index in layers

    def _layer_patterns(self) -> list[str]:
        """Where a module's name gives its layer's number: the first number of all, or after one of the names given."""
        patterns = (self.layers_pattern,) if isinstance(self.layers_pattern, str) else self.layers_pattern
        if not any(patterns or ()):
            return [r".*?\.[^.]*\.(?P<index>\d+)\."]
        return [rf"(?:^|.*?\.){pattern}\.(?P<index>\d+)\." for pattern in patterns or ()]


def matching_key(patterns: Mapping[str, Any], target: str) -> str:
    """The first pattern that matches the end of the target's name, as PEFT looks up ranks and alphas."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", target)), target)


def _matches(names: Sequence[str], module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)
