"""LoRA adapters as PEFT writes them: complete pairs of matrices, ranks as configured, every value finite.

LoRA: "LoRA: Low-Rank Adaptation of Large Language Models" (Hu et al. 2021); B @ A is added to a weight. Whether the
adapter fits a base is `service.fit`'s question; the facts say which weights it needs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from compressors.adapter_config import lora_settings, stands_for
from modelpress.errors import InvalidModel
from service.intake.configs import refuse_code_references
from service.intake.folder import MAX_CONFIG_BYTES, Folder, refuse_other_weights, refuse_payloads
from service.intake.models import FLOAT_DTYPES
from service.intake.weights import Weight, read_weights, refuse_non_finite

PREFIX = "base_model.model."
MAX_RANK = 16_384
CODE_FIELDS = ("megatron_config",)
"""Settings with which PEFT imports a module that the config names."""

_PART = re.compile(r"(?P<module>.+)\.lora_(?P<part>A\.weight|B\.weight|B\.bias)")


Parts = Mapping[str, str]
"""LoRA tensors of one module: part (`A.weight`, `B.weight`, `B.bias`) -> tensor's name."""


def inspect_adapter(folder: Folder) -> dict[str, Any]:
    """Facts of a LoRA adapter: `modules` maps a module's name to the shape that the base's weight must have and its
    rank, `saved` maps tensors that replace the base's own (`modules_to_save`, biases) to their shapes.
    """
    refuse_payloads(folder, InvalidModel)
    refuse_other_weights(folder, InvalidModel)
    config = _read_config(folder)
    weights = read_weights(folder, "adapter_model")
    ranks = _ranks_of(config)
    _check_settings(config)
    modules, saved = _sort(weights, trained_biases=config.get("bias") == "all")
    shapes = {name: _pair(name, parts, weights, ranks) for name, parts in modules.items()}
    if not shapes:
        _fail("BAD_ADAPTER", "adapter_model.safetensors", "holds no LoRA matrices: nothing could be merged")
    refuse_non_finite(folder, weights)
    return {
        "rank": config["r"],
        "task_type": config.get("task_type"),
        "target_modules": _checkable_targets(config),
        "modules": shapes,
        "saved": {target: list(weights[name].tensor.shape) for target, name in saved.items()},
        "parameters": sum(weight.tensor.elements for weight in weights.values()),
        "warnings": [],
    }


def _read_config(folder: Folder) -> dict[str, Any]:
    file = folder.manifest.entry("adapter_config.json")
    if file is None:
        _fail("NO_CONFIG", "adapter_config.json", "is missing: upload the folder that PEFT's `save_pretrained` wrote")
    config = folder.json_object(file, InvalidModel, limit=MAX_CONFIG_BYTES)
    refuse_code_references(config, file.path)
    if config.get("peft_type") != "LORA":
        _fail(
            "BAD_ADAPTER", file.path, f"has peft_type {str(config.get('peft_type'))[:40]!r}: only 'LORA' is supported"
        )
    for name in CODE_FIELDS:
        if config.get(name):
            _fail("CODE_REFERENCE", file.path, f"sets {name}, which imports a module by name: leave it out")
    alpha = config.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        _fail("BAD_ADAPTER", file.path, f"has lora_alpha {str(alpha)[:40]!r}: it must be a number")
    return config


def _check_settings(config: Mapping[str, Any]) -> None:
    """Refuse now what the merge would refuse later: a setting that it does not carry out."""
    try:
        lora_settings(config)
    except InvalidModel as fault:
        _fail("BAD_ADAPTER", "adapter_config.json", f"cannot be merged: {fault.message}")


def _ranks_of(config: Mapping[str, Any]) -> frozenset[int]:
    """Ranks that the config allows. Patterns are regular expressions of the caller's and not run here."""
    pattern = config.get("rank_pattern") or {}
    ranks = [config.get("r"), *(pattern.values() if isinstance(pattern, dict) else [None])]
    if not all(type(rank) is int and 1 <= rank <= MAX_RANK for rank in ranks):
        _fail(
            "BAD_ADAPTER",
            "adapter_config.json",
            f"must have r and rank_pattern from 1 to {MAX_RANK}, found {ranks}"[:300],
        )
    return frozenset(ranks)


def _checkable_targets(config: Mapping[str, Any]) -> list[str] | None:
    """`target_modules` where it is a list that stands for every module of these names; None where more decides."""
    targets = config.get("target_modules")
    narrowed = any(config.get(name) for name in ("layers_to_transform", "exclude_modules", "target_parameters"))
    if narrowed or not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        return None
    return targets


def _sort(weights: Mapping[str, Weight], *, trained_biases: bool) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """LoRA tensors by module, and by the base's tensor those that replace one, both without PEFT's own names."""
    modules: dict[str, dict[str, str]] = {}
    saved: dict[str, str] = {}
    for name, weight in weights.items():
        path = weight.file.path
        if weight.tensor.dtype not in FLOAT_DTYPES:
            _fail(
                "BAD_TENSORS",
                path,
                f"holds {name!r} as {weight.tensor.dtype}: use one of {', '.join(sorted(FLOAT_DTYPES))}",
            )
        if not name.startswith(PREFIX):
            _fail("BAD_ADAPTER", path, f"holds {name!r}: every name of a PEFT adapter begins with {PREFIX!r}")
        target = stands_for(name.removeprefix(PREFIX), trained_biases=trained_biases)
        found = _PART.fullmatch(target or "")
        if found:
            modules.setdefault(found["module"], {})[found["part"]] = name
        elif target and ".lora_" in target:
            _fail("BAD_ADAPTER", path, f"holds {name!r}: only LoRA on linear layers, as PEFT saves it, can be merged")
        elif target:
            saved[target] = name
    return modules, saved


def _pair(name: str, parts: Parts, weights: Mapping[str, Weight], ranks: frozenset[int]) -> dict[str, Any]:
    """The rank, and the linear layer's shape in the base, [out, in]."""
    for part, other in (("A", "B"), ("B", "A")):
        if f"{part}.weight" not in parts:
            _fail("BAD_ADAPTER", name, f"has lora_{other} and no lora_{part}: half of the adapter is missing")
    a, b = (weights[parts[f"{part}.weight"]].tensor.shape for part in ("A", "B"))
    if len(a) != 2 or len(b) != 2:
        _fail(
            "BAD_ADAPTER",
            name,
            f"has LoRA matrices of shapes {list(a)} and {list(b)}: only linear layers are supported",
        )
    if a[0] != b[1] or a[0] not in ranks:
        _fail(
            "BAD_ADAPTER",
            name,
            f"has lora_A {list(a)} and lora_B {list(b)}: A's rows and B's columns must be the rank, {sorted(ranks)}",
        )
    return {"rank": a[0], "weight": [b[0], a[1]]}


def _fail(reason: str, what: str, sentence: str) -> NoReturn:
    raise InvalidModel(f"{what} {sentence}", reason=reason, field=what)
