"""The adapter_config.json of PEFT's other kinds, made into PEFT's own configuration without PEFT's leniency."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from compressors.peft_kind_table import KINDS, Kind, Unmergeable
from compressors.peft_layers import PEFT_ERRORS
from modelpress.errors import InvalidModel

WITHOUT_EFFECT = (
    *("auto_mapping", "base_model_name_or_path", "megatron_core", "peft_version", "revision", "runtime_config"),
)
"""Settings that change nothing in what a trained adapter computes; PEFT never sees them, nor the classes they name."""
REFUSED = (
    *("layer_replication", "megatron_config", "sample_at_inference", "target_parameters", "trainable_token_indices"),
)
"""Settings that change more than the weights of single modules, or draw random numbers when the model runs."""


def kind_of(config: Mapping[str, Any]) -> Kind:
    """The kind of an adapter that can be merged; InvalidModel says why another cannot, or names the known ones."""
    name = config.get("peft_type")
    kind = KINDS.get(name) if isinstance(name, str) else None
    if isinstance(kind, Kind):
        return kind
    if isinstance(kind, Unmergeable):
        raise InvalidModel(f"peft_type is {name!r}: {kind.why}", field="peft_type", reason="UNMERGEABLE")
    known = ", ".join(("LORA", *(known for known, kind in KINDS.items() if isinstance(kind, Kind))))
    raise InvalidModel(f"peft_type is {str(name)[:80]!r}: save the adapter as one of {known}", field="peft_type")


def peft_config_of(config: Mapping[str, Any]) -> Any:
    """PEFT's configuration object; InvalidModel for a setting that it does not know, or that a merge cannot carry out.

    No setting that makes PEFT import a module by its name gets through.
    """
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    kind, name = kind_of(config), config["peft_type"]
    config_class = PEFT_TYPE_TO_CONFIG_MAPPING[name]
    known = {entry.name for entry in dataclasses.fields(config_class) if entry.init}
    settings = {setting: value for setting, value in config.items() if setting not in WITHOUT_EFFECT}
    for setting, value in settings.items():
        if value and (setting in REFUSED or setting not in known):
            raise _refused(setting, value, f"{name} is not merged with this setting; merge it with PEFT first")
    if not settings.get("target_modules") or settings["target_modules"] == "all-linear":
        raise _refused("target_modules", settings.get("target_modules"), "name the modules that the adapter is on")
    if kind.needs and not settings.get(kind.needs):
        raise _refused(
            kind.needs,
            settings.get(kind.needs),
            f"the file is not all of the adapter; load it with PEFT and save it with {kind.needs}=True",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # hints for training
            return config_class(**{setting: value for setting, value in settings.items() if setting in known})
    except PEFT_ERRORS as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InvalidModel(
            f"the adapter's configuration is none of {name}: {reason[0][:200]}; save the adapter again with PEFT",
            field="adapter_config.json",
        ) from None


def _refused(setting: str, value: Any, cure: str) -> InvalidModel:
    return InvalidModel(f"{setting} is {str(value)[:80]!r}: {cure}", field=setting)
