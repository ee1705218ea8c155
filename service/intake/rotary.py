"""Rotary position embeddings (Su et al. 2021): what a decoder's config may say of them, by transformers' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from service.intake.configs import fail, is_above_zero

ROPE_TYPES: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""rope_type -> the numbers above 0 that it needs."""
FIELDS = ("rope_parameters", "rope_scaling")


def check_rotary(config: Mapping[str, Any]) -> None:
    """InvalidModel for a kind that is unknown, lacks a number, or turns by an angle of no base."""
    _check_theta("rope_theta", config)
    for field in FIELDS:
        settings = config.get(field)
        if settings is None:
            continue
        if not isinstance(settings, dict):
            fail(field, f"is {str(settings)[:40]!r}: it must be an object with a rope_type")
        _check_theta(f"{field}.rope_theta", settings)
        kind = settings.get("rope_type", settings.get("type", "default"))
        if not isinstance(kind, str) or kind not in ROPE_TYPES:
            fail(field, f"has rope_type {str(kind)[:40]!r}: use one of {', '.join(ROPE_TYPES)}")
        for name in ROPE_TYPES[kind]:
            if not _is_number_above_zero(settings.get(name)):
                fail(field, f"has {name} {str(settings.get(name))[:40]}: {kind!r} needs a number above 0")


def rope_type(config: Mapping[str, Any]) -> str:
    """Of a config that passed `check_rotary`; the older field is the one that transformers reads first."""
    settings = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return str(settings.get("rope_type", settings.get("type", "default")))


def _check_theta(name: str, settings: Mapping[str, Any]) -> None:
    theta = settings.get("rope_theta")
    if theta is not None and not _is_number_above_zero(theta):
        fail(name, f"is {str(theta)[:40]}: it must be a number above 0, e.g. 10000")


def _is_number_above_zero(value: Any) -> bool:
    return (type(value) is int and value > 0) or is_above_zero(value)
