"""Texts of the command line as values: labels, adapters, models, sizes, durations. Each fault names its option."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from modelpress.errors import InvalidRequest
from modelpress.request_rules import check_adapter, check_model
from modelpress.requests import ARTIFACT_NAME

ChoiceT = TypeVar("ChoiceT", bound=Enum)

_SIZE_UNITS: Mapping[str, int] = {
    "": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
}
_TIME_UNITS: Mapping[str, float] = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER_AND_UNIT = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")


@dataclass(frozen=True)
class MergedOption:
    """`NAME=SOURCE[:WEIGHT]` of an adapter or a model; `source` is a folder or an artifact's name."""

    name: str
    source: str
    weight: float


def parse_labels(texts: Sequence[str]) -> dict[str, str]:
    """`key=value` each. A key given twice is refused: one of the values would be lost."""
    labels: dict[str, str] = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise InvalidRequest(f"--label {text!r}: write KEY=VALUE", field="labels")
        if key in labels:
            raise InvalidRequest(f"--label {key!r} is given twice", field="labels")
        labels[key] = value
    return labels


def parse_adapter(text: str) -> MergedOption:
    return _parse_merged("adapter", text, check_adapter)


def parse_model(text: str) -> MergedOption:
    return _parse_merged("model", text, check_model)


def parse_size(option: str, text: str) -> int:
    """Bytes, e.g. `8GiB`, `500MB`, `1048576`."""
    value, unit = _split(option, text, _SIZE_UNITS)
    return round(value * _SIZE_UNITS[unit])


def parse_duration(option: str, text: str) -> float:
    """Seconds, e.g. `90s`, `30m`, `2h`, `1.5d`, `90`."""
    value, unit = _split(option, text, _TIME_UNITS)
    return value * _TIME_UNITS[unit]


def parse_choices(option: str, texts: Sequence[str], choices: Sequence[ChoiceT]) -> tuple[ChoiceT, ...]:
    """Members of `choices` by value, whatever the case."""
    by_value = {choice.value.upper(): choice for choice in choices}
    unknown = next((text for text in texts if text.upper() not in by_value), None)
    if unknown is not None:
        raise InvalidRequest(f"{option} {unknown!r}: write one of {', '.join(by_value)}", field=option)
    return tuple(by_value[text.upper()] for text in texts)


def _parse_merged(kind: str, text: str, check: Callable[[str, float], None]) -> MergedOption:
    """The part after the last colon is the weight if it is a number and what stands before it is not cut by that."""
    name, sign, rest = text.partition("=")
    if not (name and sign and rest):
        raise InvalidRequest(f"--{kind} {text!r}: write NAME=FOLDER or NAME=FOLDER:WEIGHT", field=f"inputs.{kind}s")
    source, weight = _weighed(rest)
    try:
        check(name, weight)
    except InvalidRequest as fault:
        raise InvalidRequest(f"--{kind} {text!r}: {fault.message}", field=fault.field) from None
    return MergedOption(name, source, weight)


def _weighed(text: str) -> tuple[str, float]:
    """`SOURCE[:WEIGHT]`; without a weight it is 1."""
    source, colon, weight = text.rpartition(":")
    if not colon or not source or ARTIFACT_NAME.fullmatch(text):
        return text, 1.0
    try:
        return source, float(weight)
    except ValueError:
        return text, 1.0


def _split(option: str, text: str, units: Mapping[str, float]) -> tuple[float, str]:
    match = _NUMBER_AND_UNIT.fullmatch(text.strip().lower())
    if not match or match[2] not in units:
        names = ", ".join(unit for unit in units if unit)
        raise InvalidRequest(f"{option} {text!r}: write a number, with or without one of {names}", field=option)
    return float(match[1]), match[2]
