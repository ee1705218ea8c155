"""PEFT's adapter_config.json, read strictly: a setting that the merge does not carry out is refused by name.

Free of torch and PEFT: intake reads a configuration with the same code as the merge.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from pydantic import ConfigDict, Field

from compressors.target_modules import Expression, Names, Targeting, expressions, matching_key
from modelpress.documents import Document, read_value
from modelpress.errors import InvalidModel
from modelpress.merge_recipes import MAX_RANK

FILE = "adapter_config.json"

WITHOUT_EFFECT = (
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "fan_in_fan_out",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
)
"""Settings that change nothing in what a trained adapter's tensors mean. `fan_in_fan_out` says how a weight is stored,
and the base itself is asked for that; what is tied is told by the tensors."""
HEADS: Mapping[str | None, tuple[str, ...]] = {
    **dict.fromkeys(("SEQ_CLS", "TOKEN_CLS"), ("classifier", "score")),
    "QUESTION_ANS": ("qa_outputs",),
    **dict.fromkeys((None, "CAUSAL_LM", "SEQ_2_SEQ_LM", "FEATURE_EXTRACTION"), ()),
}
"""PEFT's task types, and the modules that PEFT trains and saves whole for each, whatever modules_to_save says."""
HARMLESS_INITS = (True, False, "gaussian", "eva", "orthogonal")
"""Ways to initialise that leave the base model's weights alone; PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA do not."""
MAX_PATTERNS = 1024
MAX_PATTERN_CHARACTERS = 4096
"""Of one regular expression: Python compiles alternatives that begin alike in the square of their length."""
_NAME = re.compile(r"[\w.]+")


class SavedModules(Document):
    """What every kind of adapter may have beside its own tensors: modules that were trained and saved whole."""

    model_config = ConfigDict(protected_namespaces=())

    modules_to_save: tuple[str, ...] | None = None
    task_type: str | None = None

    def saves(self, tensor: str) -> bool:
        """Whether the base tensor belongs to a module that was trained and saved whole: PEFT compares names' ends."""
        saved = (*(self.modules_to_save or ()), *HEADS[self.task_type])
        parents = [tensor[: match.start()] for match in re.finditer(r"\.", tensor)]
        return any(parent.endswith(name) for parent in parents for name in saved)


class LoraSettings(SavedModules):
    """What decides a LoRA adapter's change, under PEFT's own names."""

    r: int = Field(default=8, ge=1, le=MAX_RANK, strict=True)
    lora_alpha: float = Field(default=8, strict=True)
    use_rslora: bool = Field(default=False, strict=True)
    """Scale by alpha / sqrt(r) (Kalajdzievski 2023) instead of alpha / r (Hu et al. 2021)."""
    use_dora: bool = Field(default=False, strict=True)
    """Weight-decomposed (Liu et al. 2024): every module has a magnitude beside its A and B."""
    rank_pattern: dict[str, int] = Field(default_factory=dict)
    alpha_pattern: dict[str, float] = Field(default_factory=dict)
    bias: str = Field(default="none", pattern="^(none|all|lora_only)$")
    """Which of the base model's biases were trained along."""
    lora_bias: bool = Field(default=False, strict=True)
    """Whether lora_B has a bias of its own."""
    target_modules: Names = None
    target_parameters: tuple[str, ...] | None = None
    exclude_modules: Names = None
    layers_to_transform: tuple[int, ...] | int | None = None
    layers_pattern: Names = None
    trainable_token_indices: tuple[int, ...] | dict[str, tuple[int, ...]] | None = None
    """Rows of the embedding that were trained, or of several by their modules' names."""

    @property
    def peft_type(self) -> str:
        return "LORA"

    @property
    def targeting(self) -> Targeting:
        """Which modules PEFT puts the adapter on."""
        fields = Targeting.model_fields.keys()
        return Targeting.model_validate({name: getattr(self, name) for name in fields})

    @property
    def expressions(self) -> Iterator[Expression]:
        """What stands in the settings that are run as regular expressions, plain names left out."""
        patterns: dict[str, Iterable[str]] = {"rank_pattern": self.rank_pattern, "alpha_pattern": self.alpha_pattern}
        return _without_names(expressions(self.targeting, patterns))

    def rank_of(self, target: str) -> int:
        """Of a module, or of a parameter of target_parameters."""
        return self.rank_pattern.get(matching_key(self.rank_pattern, target), self.r)

    def scaling_of(self, target: str) -> float:
        """The factor on B @ A."""
        alpha = self.alpha_pattern.get(matching_key(self.alpha_pattern, target), self.lora_alpha)
        rank = self.rank_of(target)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def tokens_of(self, module: str) -> tuple[int, ...] | None:
        """The rows that were trained of this embedding; None where it has none."""
        if not isinstance(self.trainable_token_indices, dict):
            return self.trainable_token_indices
        named = self.trainable_token_indices.items()
        return next((rows for name, rows in named if module == name or module.endswith(f".{name}")), None)


class OtherSettings(SavedModules):
    """An adapter of another kind, which PEFT itself merges: `config` is its adapter_config.json."""

    peft_type: str
    config: dict[str, Any]

    @property
    def expressions(self) -> Iterator[Expression]:
        """As those of a LoRA; InvalidModel for a setting of another type than PEFT's."""
        fields = {name: self.config.get(name) for name in Targeting.model_fields}
        patterns = ((name, self.config.get(name)) for name in ("rank_pattern", "alpha_pattern"))
        keys = {name: tuple(pattern) for name, pattern in patterns if isinstance(pattern, dict)}
        return _without_names(expressions(read_value(Targeting, fields, InvalidModel), keys))


AdapterSettings = LoraSettings | OtherSettings
SettingsT = TypeVar("SettingsT", LoraSettings, OtherSettings)


def read_adapter_settings(config: Mapping[str, Any]) -> AdapterSettings:
    """The settings of a parsed adapter_config.json; InvalidModel names the setting at fault and its value.

    For worker processes: the regular expressions of whoever made the configuration are compiled.
    """
    settings = parse_adapter_settings(config)
    for name, pattern, expression in settings.expressions:
        try:
            re.compile(expression)
        except (re.error, RecursionError, OverflowError):
            raise _refused(name, pattern, "not a regular expression") from None
    return settings


def parse_adapter_settings(config: Mapping[str, Any]) -> AdapterSettings:
    """The same for a process that must not compute for long: no regular expression is compiled or run."""
    kind = config.get("peft_type")
    if not isinstance(kind, str):
        raise _refused("peft_type", kind, "save the adapter with PEFT's save_pretrained")
    if kind == "LORA":
        return _lora_settings(config)
    shared = {name: config[name] for name in ("modules_to_save", "task_type") if config.get(name) is not None}
    return _checked(read_value(OtherSettings, {**shared, "peft_type": kind, "config": dict(config)}, InvalidModel))


def _lora_settings(config: Mapping[str, Any]) -> LoraSettings:
    if config.get("init_lora_weights", True) not in HARMLESS_INITS:
        cure = (
            "this initialisation changes the base model too: save the adapter converted to plain LoRA "
            "(PEFT's save_pretrained with path_initial_model_for_weight_conversion), or merge it with PEFT"
        )
        raise _refused("init_lora_weights", config["init_lora_weights"], cure)
    understood = LoraSettings.model_fields.keys()
    for name, value in config.items():
        known = name in understood or name in WITHOUT_EFFECT or name in ("peft_type", "init_lora_weights")
        if value and not known and not _is_unused(name, config):
            raise _refused(name, value, "this setting is not supported: merge it with PEFT first")
    for name in ("r", "lora_alpha"):
        if name in config and config[name] is None:
            raise _refused(name, None, "give a number: without it nothing says how large the change is")
    settings = {name: config[name] for name in understood if config.get(name) is not None}
    return _checked_lora(read_value(LoraSettings, settings, InvalidModel))


def _is_unused(name: str, config: Mapping[str, Any]) -> bool:
    """Settings of an initialisation that the adapter has behind it, or has not used."""
    return name.removesuffix("_config") in ("eva", "loftq", "corda", "lora_ga") and (
        config.get("init_lora_weights") in HARMLESS_INITS
    )


def _checked_lora(settings: LoraSettings) -> LoraSettings:
    if not (settings.target_modules or settings.target_parameters):
        raise _refused("target_modules", settings.target_modules, "name the modules that the adapter is on")
    if settings.target_modules == "all-linear":
        raise _refused("target_modules", "all-linear", "save the adapter with PEFT, which writes the modules' names")
    if not all(1 <= rank <= MAX_RANK for rank in settings.rank_pattern.values()):
        raise _refused("rank_pattern", settings.rank_pattern, f"ranks are at least 1 and at most {MAX_RANK}")
    return _checked(settings)


def _checked(settings: SettingsT) -> SettingsT:
    for number, (name, pattern, _) in enumerate(settings.expressions):
        if number >= MAX_PATTERNS or len(pattern) > MAX_PATTERN_CHARACTERS:
            cure = f"name the modules; at most {MAX_PATTERNS} patterns of {MAX_PATTERN_CHARACTERS} characters are read"
            raise _refused(name, pattern, cure)
    if settings.task_type not in HEADS:
        known = ", ".join(sorted(filter(None, HEADS)))
        raise _refused("task_type", settings.task_type, f"not known; known: {known}")
    return settings


def _without_names(found: Iterable[Expression]) -> Iterator[Expression]:
    """Plain names need no look, however many."""
    return (each for each in found if not _NAME.fullmatch(each[1]))


def _refused(name: str, value: Any, cure: str) -> InvalidModel:
    return InvalidModel(f"{name} is {str(value)[:80]!r}: {cure}", field=name)
