"""Several adapters, weights, heads, vocabularies and other kinds: PEFT's own combination is the reference."""

from __future__ import annotations

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftModel,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from tests.evaluators.merges import check, check_layers, load, merge_by_peft, quiet, rewrite, save_base, train

EXACT, WRONG = 1e-6, 0.02


@pytest.fixture
def base(tmp_path):
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))
    return save_base(model, tmp_path / "base")


@pytest.fixture
def adapters(base, tmp_path):
    """Two that share the query layers, with other scalings."""
    first = LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "v_proj"])
    second = LoraConfig(r=4, lora_alpha=6, use_rslora=True, target_modules=["q_proj", "embed_tokens"])
    return train(base, tmp_path / "first", first), train(base, tmp_path / "second", second, seed=8)


def resized(base, rows):
    model = load(base)
    model.resize_token_embeddings(rows, mean_resizing=False)
    return model


def save_trained(model, folder, **saving):
    """Every trained tensor random, saved without a base to load from."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(2))
    model.save_pretrained(folder, **saving)
    return folder


@pytest.mark.parametrize("combination", [{"cat": 1}, {"linear": 1}, {"svd": 3}], ids=lambda row: next(iter(row)))
def test_a_weighted_sum_is_that_of_peft(base, adapters, tmp_path, combination):
    ((name, rank),) = combination.items()
    with quiet():
        model = PeftModel.from_pretrained(load(base), adapters[0], adapter_name="x")
        model.load_adapter(adapters[1], "y")
        model.base_model.add_weighted_adapter(["x", "y"], [0.7, -0.4], "z", combination_type=name, svd_rank=rank)
        model.base_model.set_adapter("z")
        model.merge_and_unload().save_pretrained(tmp_path / "merged")
    arguments = {"combination_type": name} | ({"svd_rank": rank} if name == "svd" else {})
    found = check(base, tmp_path / "merged", *adapters, weights=(0.7, -0.4), **arguments)
    assert (found["layers"], found["not_compared"]) == (5, {})
    assert found["layer_difference"] < EXACT
    assert found["logits"]["max_difference"] < 20 * EXACT * found["logits"]["max_logit"]
    found = check(base, tmp_path / "merged", *adapters, weights=(0.7, -0.5), **arguments)
    assert found["layer_difference"] > WRONG
    assert found["logits"]["max_difference"] > WRONG * found["logits"]["max_logit"]


def test_the_weight_of_a_single_adapter_counts(base, adapters, tmp_path):
    stored, factors = load_file(base / "model.safetensors"), load_file(adapters[0] / "adapter_model.safetensors")
    names = [f"model.layers.{i}.self_attn.{part}_proj" for i in range(2) for part in "qv"]
    pairs = {name: [factors[f"base_model.model.{name}.lora_{part}.weight"] for part in "BA"] for name in names}
    half = {f"{name}.weight": stored[f"{name}.weight"] + 0.5 * 3 * b @ a for name, (b, a) in pairs.items()}
    merged = rewrite(base, tmp_path / "merged", half)
    assert check_layers(base, merged, adapters[0], weights=(0.5,))["layer_difference"] < EXACT
    assert check_layers(base, merged, adapters[0])["layer_difference"] > WRONG


KINDS = {
    "IA3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LoHa": LoHaConfig(r=2, target_modules=["k_proj"]),
    "LoKr": LoKrConfig(r=2, target_modules=["k_proj"]),
    "OFT": OFTConfig(oft_block_size=4, r=0, target_modules=["q_proj"]),
    "VeRA": VeraConfig(r=4, target_modules=["q_proj"]),
    "AdaLoRA": AdaLoraConfig(target_modules=["q_proj"], total_step=10),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_are_run_by_peft(base, tmp_path, kind):
    adapter = train(base, tmp_path / "adapter", KINDS[kind])
    found = check(base, merge_by_peft(base, adapter, tmp_path / "merged"), adapter)
    assert found["not_compared"] == {}
    assert found["layer_difference"] < EXACT
    assert check_layers(base, base, adapter)["layer_difference"] > WRONG


def test_a_head_that_only_the_adapter_has_belongs_to_the_merged_class(base, tmp_path):
    def classifier(folder):
        return LlamaForSequenceClassification.from_pretrained(folder, num_labels=3)

    with quiet():
        config = LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS")
        adapter = save_trained(get_peft_model(classifier(base), config), tmp_path / "adapter")
        merged = PeftModel.from_pretrained(classifier(base), adapter).merge_and_unload()
        merged.save_pretrained(tmp_path / "merged")
    found = check(base, tmp_path / "merged", adapter)
    assert (found["layers"], found["not_compared"]) == (3, {})
    assert found["layer_difference"] < EXACT
    assert (found["logits"]["n"], found["logits"]["label_changes"]) == (5, 0)
    other = {"score.weight": torch.ones(3, 16)}
    found = check(base, rewrite(tmp_path / "merged", tmp_path / "wrong", other), adapter)
    assert found["layer"] == "score"
    assert found["layer_difference"] > WRONG


@pytest.mark.parametrize("settings", [{"modules_to_save": ["embed_tokens", "lm_head"]}, {}], ids=["modules", "layers"])
def test_a_resized_vocabulary_is_that_of_the_adapter(base, tmp_path, settings):
    with quiet():
        config = LoraConfig(r=4, target_modules=["q_proj"], **settings)
        model = get_peft_model(resized(base, 44), config)
        adapter = save_trained(model, tmp_path / "adapter", save_embedding_layers=not settings)
        model.merge_and_unload().save_pretrained(tmp_path / "merged")
    found = check(base, tmp_path / "merged", adapter)
    assert (found["layers"], found["not_compared"]) == (4, {})
    assert found["layer_difference"] < EXACT
    assert found["logits"]["max_difference"] < 20 * EXACT * found["logits"]["max_logit"]
