"""Where an adapter and its base meet: what a tensor of the one is about in the other, and how a misfit is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

import torch

from compressors.adapter_config import LoraSettings
from compressors.adapter_names import AdapterTensors
from compressors.base_layout import BaseLayout, is_outside_layers
from compressors.changes import Scratch
from compressors.edits import Load
from compressors.weight_files import StoredTensor
from modelpress.errors import InvalidModel


@dataclass(frozen=True)
class Fit:
    """One LoRA adapter on one base. `shapes` are those of parameters that the adapter brings whole, filled as they
    are found: an embedding of another vocabulary has its own.
    """

    name: str
    tensors: AdapterTensors
    settings: LoraSettings
    base: BaseLayout
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    products: Scratch = field(default_factory=lambda: Scratch(torch.float32))
    """Where the products of its factors are computed, one after the other."""

    def load(self, stored: StoredTensor) -> Load:
        return partial(self.tensors.load, stored.name)

    def has(self, parameter: str) -> bool:
        """Whether the base stores it, as a whole or in parts."""
        return self.base.find(parameter) is not None or self.base.find_fused(parameter) is not None

    def shape_of(self, parameter: str, *, asked_by: StoredTensor) -> tuple[int, ...]:
        """Of the parameter that the adapter changes: its own where the adapter brings one, else the base's."""
        if parameter in self.shapes:
            return self.shapes[parameter]
        found = self.base.find(parameter) or self.base.find_fused(parameter)
        if found is None:
            cure = "use the base that the adapter was trained on"
            self.fail(asked_by.name, f"changes {parameter!r}, which the base does not have: {cure}")
        return found.shape

    def is_targeted(self, module: str) -> bool:
        """By its name, by its weight's name, or by what it is tied to: PEFT can keep a tied pair alike."""
        weight = f"{module}.weight"
        twin = self.twin(weight).removesuffix(".weight")
        targets = self.settings.targeting.targets
        return self.is_target_parameter(weight) or targets(module) or bool(twin and targets(twin))

    def is_target_parameter(self, parameter: str) -> bool:
        return is_named(parameter, self.settings.target_parameters or ())

    def twin(self, parameter: str) -> str:
        """What the parameter is tied to in the base; empty where it is not."""
        if not is_outside_layers(parameter):
            return ""
        tied = self.base.tied
        return {**tied, **{source: target for target, source in tied.items()}}.get(parameter, "")

    def is_resized(self, parameter: str, stored: StoredTensor, found: StoredTensor) -> bool:
        """Whether `stored` is the base's embedding or head `found` for a vocabulary of another size."""
        vocabulary = self.base.vocabulary
        is_vocabulary = vocabulary is not None and found.shape[0] >= vocabulary
        return is_outside_layers(parameter) and is_vocabulary and stored.shape[1:] == found.shape[1:]

    def check_shape(self, stored: StoredTensor, expected: tuple[int, ...], why: str) -> None:
        if stored.shape != expected:
            self.fail(
                stored.name,
                f"has shape {list(stored.shape)}, expected {list(expected)} ({why}): the adapter was trained on "
                "another base, or its configuration is another one's",
            )

    def fail(self, tensor: str, what: str) -> NoReturn:
        """`what` is the rest of a sentence that starts with the tensor."""
        raise InvalidModel(f"adapter {self.name!r}: {tensor} {what}", field=tensor)


def is_named(target: str, names: Sequence[str]) -> bool:
    """Whether one of the names is the target's, or its end after a dot."""
    return any(target == name or target.endswith(f".{name}") for name in names)
