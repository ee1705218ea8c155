"""PEFT's adapter_config.json, read strictly: a setting that the merge does not carry out is refused by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from modelpress.documents import Document, read_value
from modelpress.errors import InvalidModel

FILE = "adapter_config.json"
Names = tuple[str, ...] | str | None

WITHOUT_EFFECT = (
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
)
"""Settings that change nothing in what a trained adapter computes."""
HEADS = {None: (), "SEQ_CLS": ("classifier", "score")}
"""PEFT's task types, and the modules that PEFT trains and saves whole for each, whatever modules_to_save says."""
_WRAPPERS = re.compile(r"\.(base_layer|modules_to_save(\.default)?)(?=\.)")
_UNUSED_COPY = re.compile(r".+\.original_module\.(.+\.)?bias")
"""With bias 'all' PEFT also writes the untrained biases of modules_to_save, which it never reads."""
HARMLESS_INITS = (True, False, "gaussian", "eva", "orthogonal")
"""Ways to initialise that leave the base model's weights alone; PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA do not."""


class LoraSettings(Document):
    """What decides a LoRA adapter's delta, under PEFT's own names."""

    model_config = ConfigDict(protected_namespaces=())

    r: int = Field(default=8, ge=1, le=65_536)
    lora_alpha: float = 8
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) (Kalajdzievski 2023) instead of alpha / r (Hu et al. 2021)."""
    rank_pattern: dict[str, int] = Field(default_factory=dict)
    alpha_pattern: dict[str, float] = Field(default_factory=dict)
    bias: str = Field(default="none", pattern="^(none|all|lora_only)$")
    """Which of the base model's biases were trained along."""
    lora_bias: bool = False
    """Whether lora_B has a bias of its own."""
    target_modules: Names = None
    exclude_modules: Names = None
    layers_to_transform: tuple[int, ...] | int | None = None
    layers_pattern: Names = None
    modules_to_save: tuple[str, ...] | None = None
    task_type: str | None = None

    def rank_of(self, module: str) -> int:
        return self.rank_pattern.get(_matching_key(self.rank_pattern, module), self.r)

    def scaling_of(self, module: str) -> float:
        """The factor on B @ A."""
        alpha, rank = (
            self.alpha_pattern.get(_matching_key(self.alpha_pattern, module), self.lora_alpha),
            self.rank_of(module),
        )
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    @cached_property
    def peft_config(self) -> Any:
        """The same settings as PEFT's own LoraConfig."""
        from peft import LoraConfig

        fields = self.model_dump(mode="python", exclude_none=True)
        lists = {name: list(value) for name, value in fields.items() if isinstance(value, tuple)}
        return LoraConfig(**{**fields, **lists}, inference_mode=True)

    def targets(self, module: str) -> bool:
        """Whether PEFT puts an adapter on this module of the base model, if it is a linear layer."""
        from peft.tuners.tuners_utils import check_target_module_exists

        return bool(check_target_module_exists(self.peft_config, module))

    def saves(self, tensor: str) -> bool:
        """Whether the base tensor belongs to a module that was trained and saved whole."""
        saved = (*(self.modules_to_save or ()), *HEADS[self.task_type])
        parents = [tensor[: match.start()] for match in re.finditer(r"\.", tensor)]
        return any(p == name or p.endswith(f".{name}") for p in parents for name in saved)


def stands_for(name: str, *, trained_biases: bool) -> str | None:
    """The tensor that PEFT saved as `name` (without `base_model.model.`), without PEFT's wrapper names.

    None for a copy that PEFT never reads; there are such where every bias was trained (`bias` 'all').
    """
    if trained_biases and _UNUSED_COPY.fullmatch(name):
        return None
    return _WRAPPERS.sub("", name)


def read_lora_settings(folder: Path, *, adapter: str) -> LoraSettings:
    """Read and check an adapter's configuration; InvalidModel names the setting at fault and its value."""
    config = _read_json(folder / FILE, adapter)
    try:
        return lora_settings(config)
    except InvalidModel as fault:
        raise InvalidModel(f"adapter {adapter!r}: {fault.message}", field=fault.field) from None


def lora_settings(config: Mapping[str, Any]) -> LoraSettings:
    """The settings of a parsed adapter_config.json, without torch or PEFT; InvalidModel as above."""
    if config.get("peft_type") != "LORA":
        raise _refused("peft_type", config.get("peft_type"), "only 'LORA' can be merged")
    if config.get("init_lora_weights", True) not in HARMLESS_INITS:
        cure = "this initialisation changes the base model too: save the adapter converted to plain LoRA"
        raise _refused("init_lora_weights", config["init_lora_weights"], cure)
    understood = LoraSettings.model_fields.keys()
    for name, value in config.items():
        known = name in understood or name in WITHOUT_EFFECT or name in ("peft_type", "init_lora_weights")
        if value and not known:
            raise _refused(name, value, "this setting is not supported: merge it with PEFT first")
    settings = {name: config[name] for name in understood if config.get(name) is not None}
    return _checked(read_value(LoraSettings, settings, InvalidModel))


def _checked(settings: LoraSettings) -> LoraSettings:
    if not settings.target_modules:
        raise _refused("target_modules", settings.target_modules, "name the modules that the adapter is on")
    if settings.task_type not in HEADS:
        raise _refused("task_type", settings.task_type, "the base is for text classification, SEQ_CLS")
    for pattern in (*settings.rank_pattern, *settings.alpha_pattern):
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError):
            raise _refused("rank_pattern or alpha_pattern", pattern, "not a regular expression") from None
    if any(rank < 1 for rank in settings.rank_pattern.values()):
        raise _refused("rank_pattern", settings.rank_pattern, "ranks are at least 1")
    return settings


def _matching_key(patterns: Mapping[str, Any], module: str) -> str:
    """The first pattern that matches the end of the module's name, as PEFT looks it up."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), module)


def _read_json(file: Path, adapter: str) -> dict[str, Any]:
    if not file.is_file():
        raise InvalidModel(f"adapter {adapter!r} has no {FILE}: save it with PEFT's save_pretrained", field=FILE)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise InvalidModel(f"{FILE} of adapter {adapter!r} is not valid JSON", field=FILE) from None
    if not isinstance(config, dict):
        raise InvalidModel(f"{FILE} of adapter {adapter!r} is not a JSON object", field=FILE)
    return config


def _refused(name: str, value: Any, cure: str) -> InvalidModel:
    return InvalidModel(f"{name} is {str(value)[:80]!r}: {cure}", field=name)
