"""PEFT's other kinds and bases without their head, through the whole merge: the logits are those that PEFT runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, get_peft_model
from torch import nn

from tests.compressors.conftest import edit_json
from tests.compressors.lora_merges import (
    ADAPTER,
    PREFIX,
    TOKENS,
    WIDTH,
    Bases,
    Bench,
    distance,
    factors,
    logits,
    quiet_peft,
    save,
    train,
    write_adapter,
)
from tests.compressors.stored_models import weights_of

ATTENTION = ["q_proj", "v_proj"]
KINDS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("IA3", "llama", {"target_modules": [*ATTENTION, "down_proj"], "feedforward_modules": ["down_proj"]}),
    ("IA3", "gpt2", {"target_modules": ["c_attn", "mlp.c_proj"], "feedforward_modules": ["mlp.c_proj"]}),
    ("LOHA", "llama", {"target_modules": ATTENTION, "r": 2, "modules_to_save": ["norm"]}),
    ("LOKR", "llama", {"target_modules": ATTENTION, "r": 2}),
    ("OFT", "llama", {"target_modules": ATTENTION, "oft_block_size": 4, "r": 0}),
    ("BOFT", "llama", {"target_modules": ATTENTION, "boft_block_size": 4}),
    ("ADALORA", "llama", {"target_modules": ATTENTION, "init_r": 4, "target_r": 2, "total_step": 10}),
    ("VERA", "llama", {"target_modules": ["q_proj"], "r": 4}),
    ("LN_TUNING", "llama", {"target_modules": ["input_layernorm", "norm"]}),
)


def tune(model: nn.Module, kind: str, **fields: Any) -> nn.Module:
    with quiet_peft():
        trained = get_peft_model(model, PEFT_TYPE_TO_CONFIG_MAPPING[kind](**fields))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return trained.eval()


@pytest.mark.filterwarnings("ignore:.*(CUDA extension|boft_n_butterfly|Failed to load).*")
@pytest.mark.parametrize(("kind", "base", "fields"), KINDS, ids=[f"{kind}-{base}" for kind, base, _ in KINDS])
def test_the_merged_model_is_what_peft_runs(kind: str, base: str, fields, bases: Bases, bench, tmp_path) -> None:
    model = bases.model(base)
    before = logits(model)
    trained = tune(model, kind, **fields)

    merged = bench.merge(bases.folder(base), save(trained, tmp_path / "adapter"))

    assert distance(merged.logits(type(model)), logits(trained)) < 2e-5
    assert distance(before, logits(trained)) > 1e-3
    assert merged.record.details["adapters"][0]["peft_type"] == kind


def test_kinds_add_up_with_their_weights(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    loha = save(tune(bases.model("llama"), "LOHA", target_modules=ATTENTION, r=2), tmp_path / "loha")
    lora = save(train(bases.model("llama"), target_modules=["q_proj"]), tmp_path / "lora")
    base = bases.folder("llama")
    before = weights_of(base)

    alone = [bench.merge(base, adapter).tensors for adapter in (loha, lora)]
    both = bench.merge(base, (loha, 0.5), (lora, -2.0)).tensors

    for name in before:
        expected = before[name] + 0.5 * (alone[0][name] - before[name]) - 2 * (alone[1][name] - before[name])
        torch.testing.assert_close(both[name], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["PROMPT_TUNING", "PREFIX_TUNING", "LOFTQ_OF_TOMORROW"])
def test_a_kind_that_no_weights_can_hold_is_refused(kind: str, bases: Bases, bench: Bench, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", {f"{PREFIX}prompt": torch.ones(2, 2)}, peft_type=kind)

    message = bench.refused(bases.folder("llama"), adapter).message

    assert "peft_type" in message
    assert kind in message


def test_a_tensor_of_no_layer_is_refused(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    trained = tune(bases.model("llama"), "LOHA", target_modules=ATTENTION, r=2)
    adapter = save(trained, tmp_path / "adapter")
    tensors = weights_of(adapter) | factors("model.layers.0.mlp.up_proj", 48, WIDTH)
    (adapter / ADAPTER).unlink()
    write_adapter(tmp_path / "other", tensors)
    (tmp_path / "other" / ADAPTER).rename(adapter / ADAPTER)

    message = bench.refused(bases.folder("llama"), adapter).message

    assert "up_proj.lora_" in message


@pytest.mark.parametrize(
    ("whole", "fields"),
    [
        ("LlamaForCausalLM", {"target_modules": [*ATTENTION, "embed_tokens"]}),
        ("LlamaForCausalLM", {"target_modules": ["q_proj"], "use_dora": True}),
        ("LlamaForCausalLM", {"target_modules": ["lm_head"]}),
        ("LlamaForCausalLM", {"target_modules": ["q_proj"], "trainable_token_indices": [3]}),
        ("BertForSequenceClassification", {"target_modules": ["query"], "task_type": "SEQ_CLS"}),
    ],
)
def test_a_base_that_was_saved_without_its_head_is_the_same_base(whole, fields, bench, tmp_path) -> None:
    """Names of such files lack the prefix that the adapter's names have."""
    sizes = {"vocab_size": TOKENS, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2}
    torch.manual_seed(0)
    kind = getattr(transformers, whole)
    config = kind.config_class(**sizes, num_attention_heads=4, tie_word_embeddings=True, num_labels=2)
    model = kind(config).eval()
    base = tmp_path / "base"
    model.base_model.save_pretrained(base)
    edit_json(base / "config.json", architectures=[whole])
    assert not any(name.startswith(model.base_model_prefix) for name in weights_of(base))
    trained = train(model, **fields)
    labels = ("no", "yes") if "SEQ_CLS" in fields.values() else ()

    merged = bench.merge(base, save(trained, tmp_path / "adapter"), labels=labels)

    assert distance(merged.logits(kind), logits(trained)) < 1e-5
