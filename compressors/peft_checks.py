"""Does an adapter of one of PEFT's other kinds fit its base? Each tensor has a place, and each place its tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from compressors.adapter_tensor_names import PREFIX
from compressors.peft_kind_table import SHARED_PREFIX, Kind
from compressors.peft_layers import BaseLayer, Expected
from compressors.stored_tensors import Stored, Tensors
from modelpress.errors import InvalidModel


@dataclass(frozen=True)
class Sorted:
    """An adapter's tensor names by their place. `copies` are of the shared tensor that they map to."""

    by_module: Mapping[str, list[str]]
    shared: dict[str, str] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    leftovers: list[str] = field(default_factory=list)


def sort_tensors(names: Iterable[str], kind: Kind, layers: Mapping[str, BaseLayer]) -> Sorted:
    """Give every tensor its place. InvalidModel for one of this kind on a module that is no target in the base."""
    found = Sorted({name: [] for name in layers})
    for name in names:
        if name.removeprefix(SHARED_PREFIX) in kind.shared:
            found.shared[name.removeprefix(SHARED_PREFIX)] = name
            continue
        if not name.startswith(PREFIX):
            raise InvalidModel(f"adapter tensor {name!r} does not start with {PREFIX!r}: save it with PEFT", field=name)
        path = name.removeprefix(PREFIX)
        module = _owner(path, layers)
        if module is None and kind.module_of(path):
            raise InvalidModel(
                f"adapter tensor {name!r}: target_modules name no module {kind.module_of(path)!r} of the base; the "
                "adapter was trained on another base, or its configuration is another one's",
                field=name,
            )
        if module is None:
            found.leftovers.append(name)
        elif path.removeprefix(f"{module}.") in kind.shared:
            found.copies[name] = path.removeprefix(f"{module}.")
        else:
            found.by_module[module].append(name)
    return found


def check_targets(config: Any, layers: Iterable[str]) -> None:
    """Every name in target_modules is a target's, or the end of one; not judged where other settings narrow them."""
    narrowing = ("exclude_modules", "layers_to_transform", "layers_pattern")
    names = config.target_modules
    if isinstance(names, str) or any(getattr(config, setting, None) for setting in narrowing):
        return
    parts = (layer.split(".") for layer in layers)
    there = {".".join(each[start:]) for each in parts for start in range(len(each))}
    nowhere = next((name for name in sorted(names) if name not in there), None)
    if nowhere is not None:
        raise InvalidModel(
            f"target_modules names {str(nowhere)[:80]!r}, which matches none of the base's modules: the adapter was "
            "trained on another base, or the name is misspelt",
            field="target_modules",
        )


def check_patterns(config: Any, layers: Iterable[str]) -> None:
    """Every key of a `..._pattern` is for a target: one that is for none would be a setting without effect."""
    layers = tuple(layers)
    for setting in (entry.name for entry in fields(config) if entry.name.endswith("_pattern")):
        patterns = getattr(config, setting)
        for key in patterns if isinstance(patterns, dict) else ():
            if not any(_is_for(key, layer, config) for layer in layers):
                raise InvalidModel(
                    f"{setting} has the key {str(key)[:80]!r}, which matches none of the base's modules that "
                    "target_modules name: the adapter was trained on another base, or the key is misspelt",
                    field=setting,
                )


def _is_for(key: str, layer: str, config: Any) -> bool:
    """AdaLoRA's keys name tensors of the module; those of the other kinds match the end of its name."""
    if config.peft_type == "ADALORA":
        return key.startswith(f"{layer}.")
    try:
        return re.match(rf"(.*\.)?({key})$", layer) is not None
    except (re.error, RecursionError, OverflowError):
        return False


def _owner(path: str, layers: Mapping[str, BaseLayer]) -> str | None:
    while "." in path:
        path = path.rpartition(".")[0]
        if path in layers:
            return path
    return None


def check_module(layer: BaseLayer, own: Mapping[str, Stored], expected: Mapping[str, Expected]) -> None:
    """The module has exactly the expected tensors; PEFT may have saved the weight of its base along."""
    if not own:
        raise InvalidModel(
            f"the adapter has no tensors for {layer.name!r}, which its target_modules name: "
            "it is incomplete, or was trained on another base",
            field=layer.name,
        )
    known = {f"{PREFIX}{layer.name}.base_layer.weight": Expected(layer.shape, True), **expected}
    for name in expected:
        if name not in own:
            raise InvalidModel(
                f"adapter tensor {name!r} is missing: the adapter is incomplete, or its configuration is another one's",
                field=name,
            )
    for name, stored in own.items():
        if name not in known:
            raise InvalidModel(
                f"adapter tensor {name!r} is none that PEFT saves for {layer.layout} {layer.name!r} with this "
                "configuration: save the adapter again with PEFT",
                field=name,
            )
        if tuple(stored.shape) != known[name].shape:
            raise InvalidModel(
                f"adapter tensor {name!r} has shape {list(stored.shape)}, expected {list(known[name].shape)} for "
                f"{layer.layout} {layer.name!r} {list(layer.shape)}: the adapter was trained on another base, or its "
                "configuration is another one's",
                field=name,
            )
        _check_number_kind(name, stored, known[name])


def check_shared(shared: Mapping[str, Stored], expected: Mapping[str, Expected]) -> None:
    """A shared tensor reaches as far as the module needs; the widest module of the base sets its size."""
    for name, needed in expected.items():
        if name not in shared:
            raise InvalidModel(f"adapter tensor {name!r} is missing: the adapter is incomplete", field=name)
        shape = tuple(shared[name].shape)
        if len(shape) != len(needed.shape) or any(has < needs for has, needs in zip(shape, needed.shape, strict=True)):
            raise InvalidModel(
                f"adapter tensor {name!r} has shape {list(shape)}, expected at least {list(needed.shape)}: "
                "the adapter was trained on another base, or its configuration is another one's",
                field=name,
            )
        _check_number_kind(name, shared[name], needed)


def _check_number_kind(name: str, stored: Stored, expected: Expected) -> None:
    if stored.dtype.is_floating_point != expected.is_floating_point:
        wanted = "floating point" if expected.is_floating_point else "integers"
        raise InvalidModel(
            f"adapter tensor {name!r} is {stored.dtype}, expected {wanted}: save the adapter again with PEFT",
            field=name,
        )


def check_values(adapter: Tensors, found: Sorted) -> None:
    """Every number is finite, and every copy of a shared tensor is one."""
    shared = {attribute: adapter.load(name) for attribute, name in found.shared.items()}
    used = (*found.shared.values(), *(name for names in found.by_module.values() for name in names))
    for name in used:
        tensor = adapter.load(name)
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise InvalidModel(
                f"adapter tensor {name!r} holds NaN or infinite values: go back to an earlier checkpoint",
                reason="NON_FINITE",
                field=name,
            )
    for name, attribute in found.copies.items():
        if attribute not in shared or not torch.equal(adapter.load(name), shared[attribute]):
            raise InvalidModel(
                f"adapter tensor {name!r} differs from {SHARED_PREFIX + attribute!r}, whose copy it is: "
                "save the adapter again with PEFT",
                field=name,
            )
