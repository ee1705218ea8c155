"""Regular expressions in an adapter_config.json: no upload makes intake or a merge fail by them, or compute long."""

from __future__ import annotations

from typing import Any

import pytest

from compressors.adapter_config import MAX_PATTERN_CHARACTERS, MAX_PATTERNS, LoraSettings, read_adapter_settings
from modelpress.errors import InvalidModel

MODULE = "model.layers.0.self_attn.q_proj"
SETTINGS = {
    "target_modules": lambda pattern: pattern,
    "exclude_modules": lambda pattern: pattern,
    "layers_pattern": lambda pattern: [pattern],
    "modules_to_save": lambda pattern: [pattern],
    "rank_pattern": lambda pattern: {pattern: 4},
    "alpha_pattern": lambda pattern: {pattern: 4},
}
"""Every setting that PEFT runs as a regular expression."""


def read(**changes: Any) -> LoraSettings:
    base = {"peft_type": "LORA", "target_modules": ["q_proj"], "layers_to_transform": [0]}
    settings = read_adapter_settings(base | changes)
    assert isinstance(settings, LoraSettings)
    return settings


@pytest.mark.parametrize("pattern", ["(((", "[", "*", "a{99999999999999}", "(" * 50_000, "x)|(y", "(?P<index>layers)"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_what_cannot_be_run_is_refused_wherever_it_stands(setting: str, pattern: str) -> None:
    try:
        settings = read(**{setting: SETTINGS[setting](pattern)})
    except InvalidModel as error:
        assert setting in error.message
        assert pattern[:40] in error.message
        assert len(error.message) < 300
    else:
        settings.targeting.targets(MODULE)
        settings.scaling_of(MODULE)


@pytest.mark.parametrize("setting", SETTINGS)
def test_alternatives_that_begin_alike_are_refused_before_they_are_compiled(setting: str) -> None:
    with pytest.raises(InvalidModel, match=f"{setting}.*{MAX_PATTERN_CHARACTERS} characters"):
        read(**{setting: SETTINGS[setting]("|".join(["a" * 400_000] * 2))})


def test_more_expressions_than_anybody_writes_are_refused() -> None:
    with pytest.raises(InvalidModel, match=f"at most {MAX_PATTERNS} patterns"):
        read(rank_pattern={f"layer{i}.*": 4 for i in range(80_000)})


def test_plain_names_are_no_expressions_however_many() -> None:
    names = {f"model.layers.{i}.mlp.experts.down_proj": 4 for i in range(20_000)}

    assert len(read(rank_pattern=names, layers_to_transform=None).rank_pattern) == len(names)


def test_a_module_whose_number_the_pattern_does_not_tell_is_in_no_layer() -> None:
    assert not read(layers_pattern="model|layers").targeting.targets(MODULE)


@pytest.mark.parametrize("field", ["use_rslora", "use_dora", "lora_bias"])
@pytest.mark.parametrize("value", ["no", "yes", "false", 1, [True]])
def test_a_word_is_no_truth_value(field: str, value: object) -> None:
    """PEFT takes every word for true, and `no` is one."""
    with pytest.raises(InvalidModel, match=field):
        read(**{field: value})


@pytest.mark.parametrize(("field", "value"), [("r", "4"), ("r", 4.0), ("lora_alpha", "8"), ("lora_alpha", True)])
def test_a_text_is_no_number(field: str, value: object) -> None:
    with pytest.raises(InvalidModel, match=field):
        read(**{field: value})


def test_a_rank_of_its_own_for_each_of_many_layers_is_found() -> None:
    """More than `re` keeps compiled: each lookup compiled every pattern again, a minute for a thousand layers."""
    modules = [f"model.layers.{i}.self_attn.q_proj" for i in range(700)]
    settings = read(rank_pattern={module: 1 + i for i, module in enumerate(modules)}, layers_to_transform=None)

    assert [settings.rank_of(module) for module in modules] == list(range(1, 701))
