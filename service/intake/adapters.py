"""LoRA adapters as PEFT writes them: complete pairs of matrices, ranks as configured, every value finite.

LoRA: "LoRA: Low-Rank Adaptation of Large Language Models" (Hu et al. 2021); B @ A is added to a weight. Whether the
adapter fits a base is `service.fit`'s question; the facts say which weights it needs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from modelpress.errors import InvalidModel
from service.intake.configs import refuse_code_references
from service.intake.folder import MAX_CONFIG_BYTES, Folder, refuse_other_weights, refuse_payloads
from service.intake.models import FLOAT_DTYPES
from service.intake.weights import Weight, read_weights, refuse_non_finite

PREFIX = "base_model.model."
MAX_RANK = 16_384
CODE_FIELDS = ("megatron_config",)
"""Settings with which PEFT imports a module that the config names."""
STRUCTURE_FIELDS = ("layer_replication",)
"""Settings that change which layers the base has."""

_PART = re.compile(
    r"(?P<module>.+)\.lora_(?P<part>A|B|embedding_A|embedding_B|magnitude_vector)(?P<rest>\.weight|\.bias)?"
)


Parts = Mapping[str, str]
"""LoRA tensors of one module: part (`A`, `B`, `embedding_A`, `magnitude_vector`, ...) -> tensor's name."""


def inspect_adapter(folder: Folder) -> dict[str, Any]:
    """Facts of a LoRA adapter: `modules` maps a module's name to the shape that the base's weight must have and its
    rank, `saved` maps tensors that replace the base's own (`modules_to_save`, biases) to their shapes.
    """
    refuse_payloads(folder, InvalidModel)
    refuse_other_weights(folder, InvalidModel)
    config = _read_config(folder)
    weights = read_weights(folder, "adapter_model")
    ranks = _ranks_of(config)
    modules, saved = _sort(weights)
    shapes = {name: _pair(name, parts, weights, ranks) for name, parts in modules.items()}
    if not shapes:
        _fail("BAD_ADAPTER", "adapter_model.safetensors", "holds no LoRA matrices: nothing could be merged")
    refuse_non_finite(folder, weights)
    return {
        "rank": config["r"],
        "task_type": config.get("task_type"),
        "target_modules": _checkable_targets(config),
        "modules": shapes,
        "saved": {name: list(weights[PREFIX + name].tensor.shape) for name in saved},
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
    for name in STRUCTURE_FIELDS:
        if config.get(name):
            _fail("BAD_ADAPTER", file.path, f"sets {name}, which changes the base's layers: it is not supported")
    alpha = config.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        _fail("BAD_ADAPTER", file.path, f"has lora_alpha {str(alpha)[:40]!r}: it must be a number")
    return config


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


def _sort(weights: Mapping[str, Weight]) -> tuple[dict[str, dict[str, str]], list[str]]:
    """LoRA tensors by module, and the names of the others, both without PEFT's prefix."""
    modules: dict[str, dict[str, str]] = {}
    saved = []
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
        bare = name.removeprefix(PREFIX)
        found = _PART.fullmatch(bare)
        if found:
            part = found["part"] + (".bias" if found["rest"] == ".bias" else "")
            modules.setdefault(found["module"], {})[part] = name
        elif ".lora_" in bare:
            _fail("BAD_ADAPTER", path, f"holds {name!r}, which is no LoRA tensor as PEFT saves it")
        else:
            saved.append(bare)
    return modules, saved


def _pair(name: str, parts: Parts, weights: Mapping[str, Weight], ranks: frozenset[int]) -> dict[str, Any]:
    """The rank, and the base weight's shape: [out, in] of a linear layer, [rows, width] of an embedding table."""
    kind = "embedding_" if any(part.startswith("embedding_") for part in parts) else ""
    for part, other in (("A", "B"), ("B", "A")):
        if kind + part not in parts:
            _fail(
                "BAD_ADAPTER", name, f"has lora_{kind}{other} and no lora_{kind}{part}: half of the adapter is missing"
            )
    a, b = (weights[parts[kind + part]].tensor.shape for part in ("A", "B"))
    if len(a) != 2 or len(b) != 2:
        _fail(
            "BAD_ADAPTER",
            name,
            f"has LoRA matrices of shapes {list(a)} and {list(b)}: only linear layers and embeddings are supported",
        )
    if a[0] != b[1] or a[0] not in ranks:
        _fail(
            "BAD_ADAPTER",
            name,
            f"has lora_A {list(a)} and lora_B {list(b)}: A's rows and B's columns must be the rank, {sorted(ranks)}",
        )
    shape = [a[1], b[0]] if kind else [b[0], a[1]]
    return {"rank": a[0], "weight": shape}


def _fail(reason: str, what: str, sentence: str) -> NoReturn:
    raise InvalidModel(f"{what} {sentence}", reason=reason, field=what)
