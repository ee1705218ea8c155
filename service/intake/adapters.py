"""Adapters as PEFT writes them: of a kind that can be merged, every tensor PEFT's, none empty, every value finite.

LoRA ("LoRA: Low-Rank Adaptation of Large Language Models", Hu et al. 2021: B @ A is added to a weight) is looked into:
complete pairs, ranks as configured, a magnitude for every module of a DoRA (Liu et al. 2024). What is in the tensors of
PEFT's other kinds is judged where they are merged. Whether the adapter fits a base is `service.adapter_fit`'s question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from compressors.adapter_config import AdapterSettings, LoraSettings, parse_adapter_settings
from compressors.adapter_tensor_names import PREFIX, model_name
from compressors.peft_kind_table import KINDS, SHARED_PREFIX, Unmergeable
from modelpress.errors import InvalidModel
from service.intake.compressible import FLOAT_DTYPES
from service.intake.configs import refuse_code_references
from service.intake.folder import MAX_CONFIG_BYTES, Folder, refuse_other_weights, refuse_payloads
from service.intake.lora_tensors import MAGNITUDE, PAIRS, LoraModule, is_on_parameter, parameter_owners, sort_tensors
from service.intake.weights import Weight, read_weights, refuse_empty, refuse_non_finite

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PLACING = ("bias", "exclude_modules", "layers_pattern", "layers_to_transform", "target_modules", "target_parameters")
"""Settings of a LoRA that say what its tensors are on."""
CODE_FIELDS = ("megatron_config",)
"""Settings with which PEFT imports a module that the config names."""


def inspect_adapter(folder: Folder) -> dict[str, Any]:
    """Facts of an adapter: every tensor's shape, and of a LoRA the PLACING settings."""
    refuse_payloads(folder, InvalidModel)
    refuse_other_weights(folder, InvalidModel)
    config = _read_config(folder)
    settings = _settings(config)
    weights = read_weights(folder, "adapter_model")
    refuse_empty(weights)
    placing: tuple[str, ...] = ()
    if isinstance(settings, LoraSettings):
        _check_prefixes(weights, lambda name: model_name(name) is not None)
        _check_lora(config, settings, weights)
        placing = PLACING
    else:
        _check_prefixes(weights, lambda name: name.startswith(SHARED_PREFIX))
    refuse_non_finite(folder, weights)
    return {
        "peft_type": settings.peft_type,
        "config": {name: config[name] for name in placing if name in config},
        "tensors": {name: list(weight.tensor.shape) for name, weight in weights.items()},
        "parameters": sum(weight.tensor.elements for weight in weights.values()),
        "warnings": [],
    }


def _read_config(folder: Folder) -> dict[str, Any]:
    file = folder.manifest.entry(CONFIG)
    if file is None:
        _fail("NO_CONFIG", CONFIG, "is missing: upload the folder that PEFT's `save_pretrained` wrote")
    config = folder.json_object(file, InvalidModel, limit=MAX_CONFIG_BYTES)
    refuse_code_references(config, file.path)
    for name in CODE_FIELDS:
        if config.get(name):
            _fail("CODE_REFERENCE", file.path, f"sets {name}, which imports a module by name: leave it out")
    return config


def _settings(config: Mapping[str, Any]) -> AdapterSettings:
    """What the merge will read. Regular expressions are compiled there: here they could hold up the service."""
    try:
        settings = parse_adapter_settings(config)
    except InvalidModel as fault:
        _fail("BAD_ADAPTER", CONFIG, f"cannot be merged: {fault.message}")
    _check_kind(settings.peft_type)
    return settings


def _check_kind(name: str) -> None:
    kind = KINDS.get(name)
    if isinstance(kind, Unmergeable):
        _fail("BAD_ADAPTER", CONFIG, f"has peft_type {name!r}, which cannot be merged: {kind.why}")
    if kind is None and name != "LORA":
        known = ", ".join(["LORA", *(known for known, kind in KINDS.items() if not isinstance(kind, Unmergeable))])
        _fail("BAD_ADAPTER", CONFIG, f"has peft_type {name[:40]!r}, which is not known; known: {known}")


def _check_prefixes(weights: Mapping[str, Weight], is_pefts: Callable[[str], bool]) -> None:
    for name, weight in weights.items():
        if not is_pefts(name):
            sentence = f"holds {name!r}: every name in an adapter that PEFT saved begins with {PREFIX!r}"
            _fail("BAD_ADAPTER", weight.file.path, f"{sentence}; save it with `save_pretrained`")


def _check_lora(config: Mapping[str, Any], settings: LoraSettings, weights: Mapping[str, Weight]) -> None:
    for name, weight in weights.items():
        if weight.tensor.dtype not in FLOAT_DTYPES:
            known = ", ".join(sorted(FLOAT_DTYPES))
            _fail("BAD_TENSORS", weight.file.path, f"holds {name!r} as {weight.tensor.dtype}: use one of {known}")
    found = sort_tensors({name: list(weight.tensor.shape) for name, weight in weights.items()}, config)
    if found.unknown:
        _fail("BAD_ADAPTER", WEIGHTS, f"holds {found.unknown[0]!r}, no part of a LoRA as PEFT saves it: save it again")
    if not found.modules and not settings.trainable_token_indices:
        _fail("BAD_ADAPTER", WEIGHTS, "holds no LoRA matrices: nothing could be merged")
    ranks, owners = frozenset((settings.r, *settings.rank_pattern.values())), parameter_owners(config)
    for name, module in found.modules.items():
        _check_pairs(name, module, ranks, fused=is_on_parameter(name, owners))
        _check_magnitude(name, module, uses_dora=settings.use_dora)


def _check_pairs(name: str, module: LoraModule, ranks: frozenset[int], *, fused: bool) -> None:
    """Both halves are there and have the same rank, an allowed one; of `fused` experts, a multiple of it."""
    pairs = [pair for pair in PAIRS if any(part in module.parts for part in pair)]
    if len(pairs) != 1:
        parts = ", ".join(module.parts)
        _fail("BAD_ADAPTER", name, f"has {parts}: a layer has one pair of factors, lora_A and lora_B")
    first, second = pairs[0]
    for part, other in ((first, second), (second, first)):
        if part not in module.parts:
            there = module.parts[other]
            _fail("BAD_ADAPTER", name, f"has {there!r} and no {part}: half of the adapter is missing")
    a, b = module.shape(first), module.shape(second)
    shapes = f"has {first} {a} and {second} {b}"
    if len(a) < 2 or len(b) != len(a) or (len(a) > 2 and second != "lora_B.weight"):
        _fail("BAD_ADAPTER", name, f"{shapes}: both must have the dimensions of the layer's weight, 2 or more")
    rank, columns = a[0], b[1]
    allowed = any(rank % known == 0 for known in ranks) if fused else rank in ranks
    if not allowed or (rank % columns if len(a) > 2 else rank != columns):
        _fail("BAD_ADAPTER", name, f"{shapes}: A's rows and B's columns must be the rank, {sorted(ranks)}")


def _check_magnitude(name: str, module: LoraModule, *, uses_dora: bool) -> None:
    if uses_dora and MAGNITUDE not in module.parts:
        _fail("BAD_ADAPTER", name, f"has no {MAGNITUDE}, and use_dora is true: part of the DoRA is missing")
    if not uses_dora and MAGNITUDE in module.parts:
        _fail("BAD_ADAPTER", name, f"has a {MAGNITUDE}, and use_dora is not true: the config is another one's")


def _fail(reason: str, what: str, sentence: str) -> NoReturn:
    raise InvalidModel(f"{what} {sentence}", reason=reason, field=what)
