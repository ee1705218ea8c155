"""A right merge has no difference from base plus adapter in PEFT; every wrong one that is known has a large one."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
)

from tests.evaluators.merges import check, check_layers, merge_by_peft, rewrite, save_base, train

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning"
)  # PEFT's use of transformers

EXACT = 1e-6
WRONG = 0.02
BF16 = 2**-8
"""The relative spacing of bfloat16: twice the largest error of one rounding."""

R, ALPHA = 4, 12
LORA = {"r": R, "lora_alpha": ALPHA}


def llama(**changes):
    """Two layers with grouped-query attention."""
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 4}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **(sizes | changes)))


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=32))


def bert():
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForSequenceClassification(BertConfig(intermediate_size=24, num_labels=3, **sizes))


def mixtral():
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    return MixtralForCausalLM(MixtralConfig(num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, **sizes))


def qwen3_moe():
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(num_attention_heads=4, num_key_value_heads=2, **sizes, **experts))


def resnet():
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 1], "layer_type": "basic"}
    return ResNetForImageClassification(ResNetConfig(num_labels=3, **sizes))


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
RIGHT = {
    "llama": (llama, {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}, 14),
    "llama, embeddings and head": (llama, {"target_modules": ["embed_tokens", "lm_head"], "use_rslora": True}, 2),
    "llama, DoRA": (llama, {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True}, 3),
    "llama, patterns": (llama, {"target_modules": ["q_proj"], "rank_pattern": {"0.self_attn.q_proj": 2}}, 2),
    "llama, PiSSA": (llama, {"target_modules": ["v_proj"], "init_lora_weights": "pissa"}, 2),
    "llama, tokens": (llama, {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]}, 3),
    "gpt2": (gpt2, {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}, 8),
    "gpt2, wrong flag": (gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": False}, 6),
    "bert, all biases": (bert, {"target_modules": ["query"], "bias": "all", "task_type": "SEQ_CLS"}, 19),
    "bert, lora_bias": (bert, {"target_modules": ["query"], "lora_bias": True}, 2),
    "mixtral": (mixtral, {"target_modules": ["q_proj"], "target_parameters": EXPERTS}, 6),
    "qwen3_moe": (qwen3_moe, {"target_modules": [], "target_parameters": [*EXPERTS, "mlp.gate.weight"]}, 6),
    "resnet": (resnet, {"target_modules": ["convolution"], "modules_to_save": ["classifier"]}, 7),
}


@pytest.fixture(scope="module", params=RIGHT)
def right(request, tmp_path_factory):
    """A base, an adapter and their merge by PEFT as folders, and the number of layers that the adapter touches."""
    folder, (model, settings, layers) = tmp_path_factory.mktemp("right"), RIGHT[request.param]
    base = save_base(model(), folder / "base")
    adapter = train(base, folder / "adapter", LoraConfig(**LORA, **settings))
    return base, adapter, merge_by_peft(base, adapter, folder / "merged"), layers


def test_a_right_merge_differs_by_rounding_only(right):
    base, adapter, merged, layers = right
    found = check(base, merged, adapter)
    assert (found["layers"], found["not_compared"]) == (layers, {})
    assert found["layer_difference"] < EXACT
    if found["logits"] is None:
        assert "pixel_values" in found["logits_missing"]
    else:
        assert found["logits"]["max_difference"] < 20 * EXACT * found["logits"]["max_logit"]


def test_a_forgotten_layer_is_the_one_that_is_named(right, tmp_path):
    """Every layer is merged but for the one that holds the first changed tensor."""
    base, adapter, merged, _ = right
    before, after = load_file(base / "model.safetensors"), load_file(merged / "model.safetensors")
    forgotten = next(name for name in sorted(after) if not torch.equal(after[name], before[name]))
    found = check_layers(base, rewrite(merged, tmp_path / "wrong", {forgotten: before[forgotten]}), adapter)
    assert found["layer_difference"] > WRONG
    assert found["layer"].split(".experts")[0] in forgotten.replace("block_sparse_moe", "mlp")


def test_rounding_to_the_stored_dtype_is_all_that_shows(tmp_path):
    base = save_base(llama(), tmp_path / "base", dtype=torch.bfloat16)
    adapter = train(base, tmp_path / "adapter", LoraConfig(**LORA, target_modules="all-linear"))
    merged = merge_by_peft(base, adapter, tmp_path / "merged", dtype=torch.bfloat16)
    found = check(base, merged, adapter)
    assert BF16 / 10 < found["layer_difference"] < BF16
    assert found["logits"]["max_difference"] < 0.05 * found["logits"]["max_logit"]


@pytest.fixture
def layers(tmp_path):
    """A Llama and an adapter of rank 4 on its query layers: folders, stored weights, factors by layer."""

    def make(**settings):
        base = save_base(llama(), tmp_path / "base")
        config = LoraConfig(**{**LORA, "target_modules": ["q_proj"], **settings})
        adapter = train(base, tmp_path / "adapter", config)
        return base, adapter, load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")

    return make


def queries(stored, factors, scaling):
    """W + scaling * B @ A of both query layers."""
    names = [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]
    deltas = {name: [factors[f"base_model.model.{name}.lora_{part}.weight"] for part in "BA"] for name in names}
    return {f"{name}.weight": stored[f"{name}.weight"] + scaling * b @ a for name, (b, a) in deltas.items()}


def test_rslora_with_the_plain_scale_is_caught(tmp_path, layers):
    base, adapter, stored, factors = layers(use_rslora=True)
    right = rewrite(base, tmp_path / "right", queries(stored, factors, ALPHA / math.sqrt(R)))
    wrong = rewrite(base, tmp_path / "wrong", queries(stored, factors, ALPHA / R))
    assert check_layers(base, right, adapter)["layer_difference"] < EXACT
    found = check(base, wrong, adapter)
    assert found["layer_difference"] > WRONG
    assert found["logits"]["max_difference"] > WRONG * found["logits"]["max_logit"]


def test_dora_without_its_magnitude_is_caught(tmp_path, layers):
    base, adapter, stored, factors = layers(use_dora=True)
    wrong = rewrite(base, tmp_path / "wrong", queries(stored, factors, ALPHA / R))
    assert check_layers(base, wrong, adapter)["layer_difference"] > WRONG


def test_a_bias_without_its_scale_is_caught(tmp_path):
    base = save_base(bert(), tmp_path / "base")
    config = LoraConfig(r=2, lora_alpha=16, target_modules=["query"], lora_bias=True)
    adapter = train(base, tmp_path / "adapter", config)
    merged = merge_by_peft(base, adapter, tmp_path / "merged")
    stored, factors = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    names = [f"bert.encoder.layer.{i}.attention.self.query" for i in range(2)]
    unscaled = {
        f"{name}.bias": stored[f"{name}.bias"] + factors[f"base_model.model.{name}.lora_B.bias"] for name in names
    }
    assert check_layers(base, rewrite(merged, tmp_path / "wrong", unscaled), adapter)["layer_difference"] > WRONG


def test_a_square_conv1d_merged_untransposed_is_caught(tmp_path):
    base = save_base(gpt2(), tmp_path / "base")
    adapter = train(base, tmp_path / "adapter", LoraConfig(**LORA, target_modules=["attn.c_proj"]))
    stored, factors = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")

    def merged(folder, turn):
        names = {name: f"transformer.h.{name}.attn.c_proj" for name in "01"}
        pairs = {i: [factors[f"base_model.model.{name}.lora_{p}.weight"] for p in "BA"] for i, name in names.items()}
        weights = {f"{names[i]}.weight": ALPHA / R * turn(b @ a) for i, (b, a) in pairs.items()}
        return rewrite(base, folder, {name: stored[name] + delta for name, delta in weights.items()})

    assert check_layers(base, merged(tmp_path / "right", lambda delta: delta.T), adapter)["layer_difference"] < EXACT
    assert check_layers(base, merged(tmp_path / "wrong", lambda delta: delta), adapter)["layer_difference"] > WRONG


def test_embeddings_merged_untransposed_are_caught(tmp_path):
    base = save_base(llama(vocab_size=16), tmp_path / "base")
    adapter = train(base, tmp_path / "adapter", LoraConfig(**LORA, target_modules=["embed_tokens"]))
    stored, factors = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    prefix, name = "base_model.model.model.embed_tokens.lora_embedding_", "model.embed_tokens.weight"
    delta = ALPHA / R * factors[f"{prefix}B"] @ factors[f"{prefix}A"]
    right = rewrite(base, tmp_path / "right", {name: stored[name] + delta.T})
    wrong = rewrite(base, tmp_path / "wrong", {name: stored[name] + delta})
    assert check_layers(base, right, adapter)["layer_difference"] < EXACT
    assert check_layers(base, wrong, adapter)["layer_difference"] > WRONG


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_of_tied_tensors_only_the_one_with_the_adapter_may_move(tmp_path, target):
    base = save_base(llama(tie_word_embeddings=True), tmp_path / "base")
    adapter = train(base, tmp_path / "adapter", LoraConfig(**LORA, target_modules=[target]))
    embeddings = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    factors = load_file(adapter / "adapter_model.safetensors")
    if target == "lm_head":
        delta = factors["base_model.model.lm_head.lora_B.weight"] @ factors["base_model.model.lm_head.lora_A.weight"]
    else:
        prefix = "base_model.model.model.embed_tokens.lora_embedding_"
        delta = (factors[f"{prefix}B"] @ factors[f"{prefix}A"]).T
    moved = embeddings + ALPHA / R * delta
    both = {"model.embed_tokens.weight": embeddings, "lm_head.weight": embeddings.clone()}
    moved_name = "lm_head.weight" if target == "lm_head" else "model.embed_tokens.weight"
    right = rewrite(base, tmp_path / "right", {**both, moved_name: moved}, tie_word_embeddings=False)
    wrong = rewrite(base, tmp_path / "wrong", {"model.embed_tokens.weight": moved})
    found = check(base, right, adapter)
    assert (found["layers"], found["not_compared"]) == (2, {})
    assert found["layer_difference"] < EXACT
    assert found["logits"]["max_difference"] < 20 * EXACT * found["logits"]["max_logit"]
    found = check(base, wrong, adapter)
    assert found["layer_difference"] > WRONG
    assert found["layer"] == ("model.embed_tokens.weight" if target == "lm_head" else "lm_head.weight")


def test_a_base_stored_without_its_prefix_is_found(tmp_path):
    """As the first GPT-2 is: `h.0.attn.c_attn.weight`, beside a config that names the class with the head."""
    base = save_base(gpt2(), tmp_path / "base")
    adapter = train(base, tmp_path / "adapter", LoraConfig(**LORA, target_modules=["c_attn"]))
    folders = {"base": base, "merged": merge_by_peft(base, adapter, tmp_path / "merged")}
    for name, folder in folders.items():
        shutil.copytree(folder, tmp_path / f"bare-{name}")
        tensors = load_file(folder / "model.safetensors")
        bare = {tensor.removeprefix("transformer."): value for tensor, value in tensors.items()}
        save_file(bare, tmp_path / f"bare-{name}" / "model.safetensors")
    found = check(tmp_path / "bare-base", tmp_path / "bare-merged", adapter)
    assert (found["layers"], found["not_compared"]) == (2, {})
    assert found["layer_difference"] < EXACT
    assert found["logits"]["max_difference"] < 20 * EXACT * found["logits"]["max_logit"]
