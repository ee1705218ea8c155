"""PEFT LoRA adapter folders, read into edits of the base model's tensors. What is not understood is refused.

Every tensor of the adapter ends in exactly one edit, and every module that the configuration names has its edit.
Shapes: O outputs, I inputs, R rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from compressors.adapter_config import LoraSettings, read_lora_settings, stands_for
from compressors.folders import check_finite, read_tensor_file
from modelpress.errors import InvalidModel

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
_LORA_PART = re.compile(r"(?P<module>.+)\.(?P<part>lora_A\.weight|lora_B\.weight|lora_B\.bias)")


@dataclass(frozen=True)
class LowRank:
    """W + scaling * B @ A; `a` is [R, I], `b` is [O, R]."""

    a: Tensor
    b: Tensor
    scaling: float


@dataclass(frozen=True)
class Shift:
    """bias + scaling * value, both [O]: the bias of a lora_B."""

    value: Tensor
    scaling: float


@dataclass(frozen=True)
class Replacement:
    """The trained tensor itself: of modules_to_save, or a bias that was trained along."""

    value: Tensor


Edit = LowRank | Shift | Replacement


@dataclass(frozen=True)
class Base:
    """What an adapter is checked against: the base model's tensors, and which of its modules are linear layers."""

    tensors: Mapping[str, Tensor]
    linear: frozenset[str]
    classifier: str

    @staticmethod
    def of(tensors: Mapping[str, Tensor], *, embeddings: Sequence[str], classifier: str) -> Base:
        matrices = (
            name.removesuffix(".weight") for name, t in tensors.items() if name.endswith(".weight") and t.ndim == 2
        )
        return Base(tensors, frozenset(module for module in matrices if module not in embeddings), classifier)


@dataclass(frozen=True)
class LoraAdapter:
    """`edits` by name of the base tensor, each a tuple of one or two edits that apply in turn."""

    name: str
    settings: LoraSettings
    edits: Mapping[str, tuple[Edit, ...]]


def read_adapter(folder: Path, base: Base, *, name: str) -> LoraAdapter:
    """Read one adapter for `base`; InvalidModel names the setting or tensor that does not fit, and both shapes."""
    settings = read_lora_settings(folder, adapter=name)
    edits: dict[str, tuple[Edit, ...]] = {}
    modules: dict[str, dict[str, Tensor]] = {}
    for target, tensor in _by_target(_read_tensors(folder, name), settings).items():
        match = _LORA_PART.fullmatch(target)
        if match:
            modules.setdefault(match["module"], {})[match["part"]] = tensor
        else:
            edits[target] = (Replacement(_checked_replacement(target, tensor, base=base, settings=settings)),)
    for module, parts in modules.items():
        for target, edit in _module_edits(module, parts, base=base, settings=settings).items():
            edits[target] = (*edits.get(target, ()), edit)
    _check_complete(settings, base, found=modules.keys() | edits.keys(), adapter=name)
    return LoraAdapter(name, settings, edits)


def _read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    if not (folder / WEIGHTS).is_file():
        raise InvalidModel(f"adapter {name!r} has no {WEIGHTS}: save it with safe_serialization=True", field=WEIGHTS)
    tensors = read_tensor_file(folder / WEIGHTS)
    if not tensors:
        raise InvalidModel(f"adapter {name!r} holds no tensors", field=WEIGHTS)
    for key, tensor in tensors.items():
        if not key.startswith(PREFIX):
            raise InvalidModel(f"adapter tensor {key!r} does not start with {PREFIX!r}: save it with PEFT", field=key)
        if not tensor.is_floating_point():
            raise InvalidModel(f"adapter tensor {key!r} is {tensor.dtype}: expected floating point", field=key)
    check_finite(tensors, of=f"adapter {name!r}")
    return tensors


def _by_target(tensors: Mapping[str, Tensor], settings: LoraSettings) -> dict[str, Tensor]:
    """The tensors without PEFT's wrapper names; one that stands twice must be the same twice."""
    targets: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        target = stands_for(key.removeprefix(PREFIX), trained_biases=settings.bias == "all")
        if target is None:
            continue
        if target in targets and not torch.equal(targets[target], tensor):
            raise InvalidModel(f"adapter tensor {key!r} differs from its other copy: save the adapter again", field=key)
        targets[target] = tensor
    return targets


def _module_edits(module: str, parts: Mapping[str, Tensor], *, base: Base, settings: LoraSettings) -> dict[str, Edit]:
    """The edits of one adapted linear layer, by base tensor."""
    key = f"{PREFIX}{module}"
    if module not in base.linear:
        raise InvalidModel(f"adapter tensor '{key}.lora_A': the base model has no linear layer {module!r}", field=key)
    for part in ("lora_A.weight", "lora_B.weight", *(["lora_B.bias"] if settings.lora_bias else [])):
        if part not in parts:
            raise InvalidModel(f"adapter tensor '{key}.{part}' is missing: the adapter is incomplete", field=key)
    if "lora_B.bias" in parts and not settings.lora_bias:
        raise InvalidModel(f"adapter tensor '{key}.lora_B.bias' contradicts lora_bias false", field=key)
    if not settings.targets(module):
        raise InvalidModel(f"adapter tensor '{key}.lora_A.weight' is on a module outside target_modules", field=key)
    outputs, inputs = base.tensors[f"{module}.weight"].shape
    rank, scaling = settings.rank_of(module), settings.scaling_of(module)
    _check_shape(f"{key}.lora_A.weight", parts["lora_A.weight"], (rank, inputs), why=f"rank {rank} and {inputs} inputs")
    _check_shape(
        f"{key}.lora_B.weight", parts["lora_B.weight"], (outputs, rank), why=f"{outputs} outputs and rank {rank}"
    )
    edits: dict[str, Edit] = {f"{module}.weight": LowRank(parts["lora_A.weight"], parts["lora_B.weight"], scaling)}
    if settings.lora_bias:
        if f"{module}.bias" not in base.tensors:
            raise InvalidModel(
                f"adapter tensor '{key}.lora_B.bias': the base layer has no bias to add it to", field=key
            )
        _check_shape(f"{key}.lora_B.bias", parts["lora_B.bias"], (outputs,), why=f"{outputs} outputs")
        edits[f"{module}.bias"] = Shift(parts["lora_B.bias"], scaling)
    return edits


def _checked_replacement(target: str, tensor: Tensor, *, base: Base, settings: LoraSettings) -> Tensor:
    """A tensor that stands for a base tensor as it is: allowed for modules_to_save and for trained biases."""
    key = f"{PREFIX}{target}"
    if target not in base.tensors:
        raise InvalidModel(
            f"adapter tensor {key!r} {list(tensor.shape)} fits no tensor of the base model: "
            "the adapter was trained on another base, or is not LoRA on a linear layer",
            field=key,
        )
    trained_bias = target.endswith(".bias") and (
        settings.bias == "all" or (settings.bias == "lora_only" and settings.targets(target.removesuffix(".bias")))
    )
    if not (trained_bias or settings.saves(target)):
        raise InvalidModel(
            f"adapter tensor {key!r} is neither LoRA nor in modules_to_save nor a trained bias", field=key
        )
    _check_shape(key, tensor, tuple(base.tensors[target].shape), why="the base tensor")
    return tensor


def _check_shape(key: str, tensor: Tensor, expected: tuple[int, ...], *, why: str) -> None:
    if tuple(tensor.shape) != expected:
        raise InvalidModel(
            f"adapter tensor {key!r} has shape {list(tensor.shape)}, expected {list(expected)} ({why}): "
            "the adapter was trained on another base, or its configuration is another one's",
            field=key,
        )


def _check_complete(settings: LoraSettings, base: Base, *, found: set[str], adapter: str) -> None:
    """Every module that the configuration names is there: half an adapter never passes as a whole one."""
    for module in sorted(base.linear):
        head = settings.target_modules == "all-linear" and module == base.classifier
        if settings.targets(module) and not head and module not in found:
            raise InvalidModel(
                f"adapter {adapter!r} has no tensors for {module!r}, which its target_modules name: "
                "it is incomplete, or was trained on another base",
                field=module,
            )
    for tensor in sorted(base.tensors):
        trained_bias = settings.bias == "all" and tensor.endswith(".bias")
        if (settings.saves(tensor) or trained_bias) and tensor not in found:
            raise InvalidModel(
                f"adapter {adapter!r} lacks the trained {tensor!r}: save it again with PEFT", field=tensor
            )
