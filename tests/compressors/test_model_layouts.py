"""Which stored tensors a model loads, told by their names and the config alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from compressors.model_layouts import is_conv1d, is_loaded, layer_count
from tests.compressors.lora_merges import QUERY, Bases, Bench, factors, write_adapter


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"num_hidden_layers": 61}, 61),
        ({"n_layer": 12}, 12),
        ({"num_layers": 24, "num_decoder_layers": 30}, 30),
        ({"num_hidden_layers": 6, "encoder_layers": 6, "decoder_layers": 12}, 12),
        ({"text_config": {"num_hidden_layers": 46}, "vision_config": {"num_hidden_layers": 24}}, 46),
        ({"num_hidden_layers": "61"}, None),
        ({"num_hidden_layers": True}, None),
        ({"num_hidden_layers": 0}, None),
        ({}, None),
    ],
    ids=str,
)
def test_layers_are_counted_in_the_deepest_part(config: dict[str, Any], layers: int | None) -> None:
    assert layer_count(config) == layers


@pytest.mark.parametrize(
    ("name", "loaded"),
    [
        ("model.layers.60.mlp.down_proj.weight", True),
        ("model.layers.61.mlp.down_proj.weight", False),
        ("model.layers.61.embed_tokens.weight", False),
        ("model.language_model.layers.100.shared_head.norm.weight", False),
        ("model.layers.0.mlp.experts.200.down_proj.weight", True),
        ("encoder.block.0.layer.99.wi.weight", True),
        ("feature_extractor.conv_layers.99.conv.weight", True),
        ("mtp.layers.0.mlp.down_proj.weight", False),
        ("model.mtp_block.0.mlp.down_proj.weight", False),
        ("model.mtp.norm.weight", False),
        ("model.smtp.norm.weight", True),
        ("lm_head.weight", True),
    ],
)
def test_layers_beyond_the_last_and_those_that_predict_further_tokens_are_not_loaded(name: str, loaded: bool) -> None:
    assert is_loaded(name, 61) == loaded
    assert is_loaded(name, None) == ("mtp" not in name.replace("smtp", ""))


def test_a_conv1d_is_one_of_a_type_and_a_name() -> None:
    assert is_conv1d("transformer.h.0.attn.c_attn", "gpt2")
    assert not is_conv1d("transformer.h.0.attn.q_proj", "gpt2")
    assert not is_conv1d("transformer.h.0.attn.c_attn", "gpt_bigcode")
    assert not is_conv1d("transformer.h.0.attn.c_attn", None)


def test_an_adapter_needs_no_tensors_for_a_layer_that_is_not_loaded(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    """As DeepSeek's files have it: one stored layer more than num_hidden_layers says."""
    base = shutil.copytree(bases.folder("llama"), tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", factors(QUERY, 32, 32), target_modules=["q_proj"])
    message = bench.refused(base, adapter).message
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))

    assert "model.layers.1.self_attn.q_proj.lora_A.weight is missing" in message
    assert bench.merge(base, adapter).record.touched == (f"{QUERY}.weight",)
