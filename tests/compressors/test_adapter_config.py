"""adapter_config.json: what PEFT writes is read, what a merge does not carry out is refused by name, value and cure."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any

import pytest
from peft import LoraConfig

from compressors.adapter_config import (
    HEADS,
    WITHOUT_EFFECT,
    LoraSettings,
    OtherSettings,
    read_adapter_settings,
)
from compressors.adapter_tensor_names import plain_name
from modelpress.errors import InvalidModel

MINIMAL: dict[str, Any] = {"peft_type": "LORA", "target_modules": ["q_proj"]}


def lora(**changes: Any) -> LoraSettings:
    settings = read_adapter_settings(MINIMAL | changes)
    assert isinstance(settings, LoraSettings)
    return settings


def peft_config(**changes: Any) -> dict[str, Any]:
    """adapter_config.json as this PEFT writes it."""
    config = LoraConfig(target_modules=["q_proj"], **changes).to_dict()
    return json.loads(json.dumps(config, default=lambda value: sorted(value) if isinstance(value, set) else str(value)))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"r": 16, "lora_alpha": 32, "use_rslora": True, "lora_dropout": 0.1},
        {"task_type": "SEQ_CLS", "bias": "all", "lora_bias": False},
        {"init_lora_weights": "gaussian", "inference_mode": True, "revision": "main", "fan_in_fan_out": True},
        {"init_lora_weights": "orthogonal", "rank_pattern": {"q_proj": 4}},
        {"trainable_token_indices": {"embed_tokens": [1, 2]}, "modules_to_save": ["norm"]},
    ],
    ids=str,
)
def test_what_peft_writes_is_read(changes: dict[str, Any]) -> None:
    settings, theirs = read_adapter_settings(peft_config(**changes)), LoraConfig(target_modules=["q_proj"], **changes)

    assert isinstance(settings, LoraSettings)
    for name in ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "bias", "lora_bias"):
        assert getattr(settings, name) == getattr(theirs, name)


def test_every_field_of_peft_is_carried_out_or_without_effect_or_refused_where_it_is_set() -> None:
    """A field of a later PEFT is none of the three: it is refused by its name."""
    unknown = {field.name for field in fields(LoraConfig)} - LoraSettings.model_fields.keys() - set(WITHOUT_EFFECT)
    for name in unknown - {"peft_type", "task_type", "init_lora_weights"}:
        with pytest.raises(InvalidModel, match=f"{name} is 'set'") as error:
            lora(**{name: "set"})
        assert error.value.field == name


@pytest.mark.parametrize(
    ("changes", "mentions"),
    [
        ({"peft_type": None}, ["peft_type", "None", "save_pretrained"]),
        ({"a_setting_of_tomorrow": True}, ["a_setting_of_tomorrow", "True", "merge it with PEFT"]),
        ({"megatron_config": {"a": 1}}, ["megatron_config", "'a': 1"]),
        ({"layer_replication": [[0, 2], [1, 3]]}, ["layer_replication", "[[0, 2], [1, 3]]"]),
        ({"use_qalora": True}, ["use_qalora"]),
        ({"corda_config": {"x": 1}, "init_lora_weights": "corda"}, ["init_lora_weights", "corda"]),
        ({"r": 0}, ["r:"]),
        ({"r": "eight"}, ["r:"]),
        ({"lora_alpha": "large"}, ["lora_alpha"]),
        ({"use_dora": "perhaps"}, ["use_dora"]),
        ({"bias": "some"}, ["bias", "none|all|lora_only"]),
        ({"rank_pattern": {"q_proj": 0}}, ["rank_pattern", "0", "at least 1"]),
        ({"rank_pattern": {"(": 4}}, ["rank_pattern", "(", "regular expression"]),
        ({"alpha_pattern": {"a{99999999999999}": 4}}, ["alpha_pattern", "regular expression"]),
        ({"target_modules": []}, ["target_modules", "name the modules"]),
        ({"target_modules": None}, ["target_modules", "name the modules"]),
        ({"target_modules": "all-linear"}, ["target_modules", "all-linear", "save the adapter with PEFT"]),
        ({"target_modules": {"q_proj": 1}}, ["target_modules"]),
        ({"task_type": "FOREIGN"}, ["task_type", "FOREIGN", "SEQ_CLS"]),
        ({"modules_to_save": "lm_head"}, ["modules_to_save"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)
def test_a_setting_that_is_not_carried_out_is_refused(changes: dict[str, Any], mentions: list[str]) -> None:
    with pytest.raises(InvalidModel) as error:
        read_adapter_settings(MINIMAL | changes)

    assert all(mention in error.value.message for mention in mentions), error.value.message


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16", "olora", "loftq", "corda", "lora_ga", "anything"])
def test_an_initialisation_that_changes_the_base_is_refused_with_the_cure(init: str) -> None:
    with pytest.raises(InvalidModel, match="init_lora_weights") as error:
        lora(init_lora_weights=init)

    assert all(part in error.value.message for part in (init, "path_initial_model_for_weight_conversion"))


@pytest.mark.parametrize("init", [True, False, "gaussian", "orthogonal", "eva"])
def test_an_initialisation_of_the_factors_alone_is_merged(init: object) -> None:
    assert lora(init_lora_weights=init, eva_config={"rho": 2.0}) == lora()


@pytest.mark.parametrize(
    ("changes", "rank", "scaling"),
    [
        ({"r": 16, "lora_alpha": 8}, 16, 0.5),
        ({"r": 16, "lora_alpha": 8, "use_rslora": True}, 16, 2.0),
        ({"r": 16, "lora_alpha": 8, "rank_pattern": {"q_proj": 2}}, 2, 4.0),
        ({"r": 16, "lora_alpha": 8, "alpha_pattern": {r"layers\.0\..*": 4}}, 16, 0.25),
        ({"r": 16, "lora_alpha": 8, "alpha_pattern": {r"layers\.1\..*": 4}}, 16, 0.5),
        ({"lora_alpha": 3, "use_rslora": True, "rank_pattern": {"layers.0.self_attn.q_proj": 9}}, 9, 1.0),
        ({"rank_pattern": {"proj": 2}}, 8, 1.0),
        ({}, 8, 1.0),
    ],
    ids=str,
)
def test_rank_and_scaling_follow_the_papers(changes: dict[str, Any], rank: int, scaling: float) -> None:
    settings = lora(**changes)

    assert settings.rank_of("model.layers.0.self_attn.q_proj") == rank
    assert math.isclose(settings.scaling_of("model.layers.0.self_attn.q_proj"), scaling)


def test_heads_of_a_task_are_saved_whole() -> None:
    assert lora(task_type="SEQ_CLS").saves("classifier.dense.weight")
    assert lora(task_type="QUESTION_ANS").saves("qa_outputs.bias")
    assert lora(modules_to_save=["norm"]).saves("model.layers.0.norm.weight")
    assert not lora(task_type="CAUSAL_LM").saves("classifier.weight")
    assert not lora(modules_to_save=["norm"]).saves("norms.weight")
    assert set(HEADS) == {
        None,
        "SEQ_CLS",
        "SEQ_2_SEQ_LM",
        "CAUSAL_LM",
        "TOKEN_CLS",
        "QUESTION_ANS",
        "FEATURE_EXTRACTION",
    }


def test_trained_tokens_belong_to_their_embedding() -> None:
    assert lora(trainable_token_indices=[1, 2]).tokens_of("model.embed_tokens") == (1, 2)
    named = lora(trainable_token_indices={"embed_tokens": [3]})
    assert (named.tokens_of("model.embed_tokens"), named.tokens_of("lm_head")) == ((3,), None)
    assert lora().tokens_of("model.embed_tokens") is None


def test_another_kind_is_passed_on_whole() -> None:
    config = {"peft_type": "LOHA", "r": 4, "modules_to_save": ["score"], "anything": 1}

    settings = read_adapter_settings(config)

    assert isinstance(settings, OtherSettings)
    assert (settings.peft_type, settings.config, settings.modules_to_save) == ("LOHA", config, ("score",))


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("model.norm.weight", "model.norm.weight"),
        ("score.modules_to_save.weight", "score.weight"),
        ("score.modules_to_save.default.weight", "score.weight"),
        ("modules_to_save.weight", "modules_to_save.weight"),
        ("score.original_module.bias", None),
        ("score.original_module.dense.weight", None),
        ("x.original_module.lora_A.weight", "x.original_module.lora_A.weight"),
    ],
)
def test_pefts_wrapper_of_a_saved_module_is_no_part_of_its_name(name: str, plain: str | None) -> None:
    assert plain_name(name, trained_biases=True) == plain
