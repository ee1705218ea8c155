"""PEFT's adapters that are not LoRA, read strictly and merged by PEFT's own layers, one module at a time.

    other = read_other_kind(config, adapter, base=base, layouts={})
    rows = other.changes["model.layers.0.mlp.up_proj.weight"].begin(stored)

Every tensor of the adapter is used by one module of the base, or left over by name; every module that the
configuration targets has all its tensors, in the shapes that PEFT gives them. Nothing is merged before all that holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressors.changes import Rows
from compressors.peft_checks import (
    Sorted,
    check_module,
    check_patterns,
    check_shared,
    check_targets,
    check_values,
    sort_tensors,
)
from compressors.peft_configs import kind_of, peft_config_of
from compressors.peft_kind_table import Kind, Part
from compressors.peft_layers import BaseLayer, Layout, expected_tensors, merged_module
from compressors.stored_tensors import Tensors
from modelpress.errors import InvalidModel

LAYOUTS: Mapping[int, Layout] = {1: "Norm", 2: "Linear", 3: "Conv", 4: "Conv", 5: "Conv"}
"""What a module is whose weight has so many dimensions, unless the caller knows better."""


@dataclass(frozen=True)
class ThroughPeft:
    """One tensor of the base, changed by PEFT's own merge of its module.

    `names` are the module's tensors in `adapter`; `shared` those of the whole adapter, by their name on PEFT's model.
    """

    layer: BaseLayer
    part: Part
    config: Any
    names: tuple[str, ...]
    shared: Mapping[str, str]
    adapter: Tensors
    base: Tensors

    def begin(self, stored: Tensor) -> Rows:
        """PEFT's merge in FP32, in FP64 where that is stored. `stored` keeps its values."""
        dtype = torch.float64 if stored.dtype == torch.float64 else torch.float32
        weight = stored if self.part == "weight" else self.base.load(f"{self.layer.name}.weight")
        bias = stored if self.part == "bias" else self.layer.blank_bias()
        module = merged_module(
            self.config,
            self.layer,
            base=self.layer.module(weight.to(dtype, copy=True), None if bias is None else bias.to(dtype, copy=True)),
            tensors={name: self.adapter.load(name) for name in self.names},
            shared={attribute: self.adapter.load(name) for attribute, name in self.shared.items()},
        )
        merged: Tensor = getattr(module, self.part).detach()
        return lambda start, stop: merged[start:stop]


@dataclass(frozen=True)
class OtherKind:
    """An adapter that fits its base. `changes` are by name of the base's tensor.

    `leftovers` are the adapter's tensors that its kind does not name: of modules_to_save, or biases trained along.
    """

    changes: Mapping[str, ThroughPeft]
    leftovers: tuple[str, ...]


def read_other_kind(
    config: Mapping[str, Any], adapter: Tensors, *, base: Tensors, layouts: Mapping[str, Layout]
) -> OtherKind:
    """Read an adapter for `base`. `layouts` are those of modules whose matrix is not that of a torch.nn.Linear.

    InvalidModel names the setting, tensor or module that does not fit, and both shapes.
    """
    kind, peft_config = kind_of(config), peft_config_of(config)
    layers = _targets(peft_config, kind, base=base, layouts=layouts)
    check_targets(peft_config, layers)
    check_patterns(peft_config, layers)
    found = sort_tensors(adapter.tensors, kind, layers)
    for layer in layers.values():
        expected = expected_tensors(peft_config, layer, device=kind.sized_on)
        check_module(layer, {name: adapter.tensors[name] for name in found.by_module[layer.name]}, kind.own(expected))
        check_shared({name: adapter.tensors[name] for name in found.shared.values()}, kind.common(expected))
    check_values(adapter, found)
    changes = {
        f"{layer.name}.{part}": ThroughPeft(
            layer, part, peft_config, tuple(found.by_module[layer.name]), found.shared, adapter, base
        )
        for layer in layers.values()
        for part in _changed_parts(kind, layer, found)
    }
    return OtherKind(changes, tuple(found.leftovers))


def _targets(config: Any, kind: Kind, *, base: Tensors, layouts: Mapping[str, Layout]) -> dict[str, BaseLayer]:
    """The base's modules that the configuration puts an adapter on, as PEFT decides it."""
    from peft.tuners.tuners_utils import check_target_module_exists

    layers: dict[str, BaseLayer] = {}
    for tensor, stored in base.tensors.items():
        module, _, parameter = tensor.rpartition(".")
        if parameter != "weight" or not kind.least_dims <= len(stored.shape) <= max(LAYOUTS):
            continue
        try:
            targeted = bool(check_target_module_exists(config, module))
        except (re.error, RecursionError, OverflowError):
            raise _no_target(config, "not a regular expression; correct it") from None
        if targeted:
            layout = layouts.get(module, LAYOUTS[len(stored.shape)])
            layers[module] = BaseLayer(module, layout, tuple(stored.shape), f"{module}.bias" in base.tensors)
            _check_sound(config, kind, layers[module])
    if not layers:
        raise _no_target(config, "no module of the base matches; name the base that the adapter was trained on")
    return layers


def _check_sound(config: Any, kind: Kind, layer: BaseLayer) -> None:
    if kind.unsound(layer):
        raise InvalidModel(
            f"PEFT merges {config.peft_type.value} on {layer.layout} {layer.name!r} {list(layer.shape)} into another "
            "model than it runs unmerged: serve it with PEFT, or train the adapter without this module",
            reason="UNMERGEABLE",
            field=layer.name,
        )


def _no_target(config: Any, why: str) -> InvalidModel:
    return InvalidModel(f"target_modules is {str(config.target_modules)[:80]!r}: {why}", field="target_modules")


def _changed_parts(kind: Kind, layer: BaseLayer, found: Sorted) -> tuple[Part, ...]:
    """The parameters of the module that the merge changes; a bias also where it was trained along."""
    trained = any(name.endswith(".base_layer.bias") for name in found.by_module[layer.name])
    parts: tuple[Part, ...] = (*kind.changes, *(("bias",) if trained and "bias" not in kind.changes else ()))
    existing = tuple(part for part in parts if part == "weight" or layer.has_bias)
    if not existing:
        raise InvalidModel(
            f"the adapter changes biases, and {layer.name!r} of the base has none: name its own base",
            field=layer.name,
        )
    return existing
