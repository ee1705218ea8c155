"""Models of many architectures: names, ties and experts are found in the files as PEFT finds them in the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.compressors.lora_merges import IDS, TOKENS, WIDTH, Bench, distance, quiet_peft, save, train

SIZES = {"vocab_size": TOKENS, "initializer_range": 0.1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {
    **{"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
BART = {
    **{"d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4},
    **{"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 32},
}
T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
MODELS: Mapping[str, dict[str, Any]] = {
    "BartForConditionalGeneration": BART,
    "BertForMaskedLM": DECODER,
    "BloomForCausalLM": {"hidden_size": WIDTH, "n_layer": 1, "n_head": 4},
    "Ernie4_5_MoeForCausalLM": {**DECODER, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "Gemma3ForCausalLM": DECODER,
    "GPTJForCausalLM": {"n_embd": WIDTH, "n_layer": 1, "n_head": 4, "rotary_dim": 4, "n_positions": 32},
    "OlmoeForCausalLM": DECODER | EXPERTS,
    "OPTForCausalLM": {
        **{"hidden_size": WIDTH, "ffn_dim": 48, "num_hidden_layers": 1, "num_attention_heads": 4},
        **{"word_embed_proj_dim": WIDTH, "max_position_embeddings": 32},
    },
    "PhiForCausalLM": DECODER,
    "Qwen3MoeForCausalLM": DECODER | EXPERTS,
    "T5ForConditionalGeneration": T5,
}
TIED_SEVERAL_TIMES = ("BartForConditionalGeneration", "T5ForConditionalGeneration")


def make(name: str) -> nn.Module:
    model_class = getattr(transformers, name)
    config_class = model_class.config_class
    torch.manual_seed(0)
    return model_class(config_class(**SIZES | MODELS[name])).eval()


def run(model: nn.Module) -> Tensor:
    decoder = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=IDS, **decoder).logits


def name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def merge_and_compare(model: nn.Module, root: Path, bench: Bench, **fields: Any) -> None:
    before = run(model)
    model.save_pretrained(root / "base")
    trained = train(model, **fields)
    merged = bench.merge(root / "base", save(trained, root / "adapter"))

    with quiet_peft():
        after = type(trained.get_base_model()).from_pretrained(merged.folder, dtype=torch.float32).eval()

    assert distance(run(after), run(trained)) < 2e-5
    assert distance(before, run(trained)) > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_all_linear_layers_and_experts(name: str, bench: Bench, tmp_path: Path) -> None:
    merge_and_compare(make(name), tmp_path, bench, target_modules="all-linear")


@pytest.mark.parametrize("name", MODELS)
def test_trained_tokens(name: str, bench: Bench, tmp_path: Path) -> None:
    model = make(name)
    table = name_of(model, model.get_input_embeddings()).rpartition(".")[2]

    merge_and_compare(model, tmp_path, bench, target_modules="all-linear", trainable_token_indices={table: [3, 5]})


@pytest.mark.parametrize("name", [name for name in MODELS if name not in TIED_SEVERAL_TIMES])
@pytest.mark.parametrize("part", ["get_input_embeddings", "get_output_embeddings"])
def test_embedding_and_head(name: str, part: str, bench: Bench, tmp_path: Path) -> None:
    model = make(name)

    merge_and_compare(model, tmp_path, bench, target_modules=[name_of(model, getattr(model, part)())])


@pytest.mark.parametrize("name", TIED_SEVERAL_TIMES)
@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["lm_head"]},
        {"target_modules": ["shared"]},
        {"target_modules": ["q"], "modules_to_save": ["shared"]},
    ],
    ids=str,
)
def test_what_is_tied_to_several_is_refused(name: str, fields: dict[str, Any], bench: Bench, tmp_path: Path) -> None:
    """Without `tie_word_embeddings` encoder and decoder would lose their embeddings, which no file holds."""
    model = make(name)
    model.save_pretrained(tmp_path / "base")
    if fields["target_modules"] == ["q"] and name.startswith("Bart"):
        fields = fields | {"target_modules": ["q_proj"]}
    adapter = save(train(model, **fields), tmp_path / "adapter")

    message = bench.refused(tmp_path / "base", adapter).message

    assert all(part in message for part in ("shared.weight", "tied", "embed_tokens.weight", "train")), message
