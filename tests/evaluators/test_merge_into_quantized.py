"""A merge into a quantized base is compared with the values that its codes stand for."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.evaluators.merges import check_layers, rewrite, save_base, train

NAME = "model.layers.0.self_attn.q_proj.weight"
BLOCK, NESTED = 64, 256


def state(**fields):
    text = json.dumps({"quant_type": "nf4", "blocksize": BLOCK, "dtype": "bfloat16", "shape": [16, 16], **fields})
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def four_bits(generator):
    """Packed codes of one weight [16, 16], and its values one by one."""
    codes = torch.randint(16, (256,), generator=generator)
    table, scales = torch.randn(16, generator=generator), torch.rand(4, generator=generator)
    stored = {
        NAME: (codes[0::2] * 16 + codes[1::2]).to(torch.uint8)[:, None],
        f"{NAME}.absmax": scales,
        f"{NAME}.quant_map": table,
        f"{NAME}.quant_state.bitsandbytes__nf4": state(),
    }
    values = [table[code] * scales[i // BLOCK] for i, code in enumerate(codes.tolist())]
    return stored, torch.stack(values).view(16, 16)


def nested(generator):
    """The same with scales that are quantized themselves."""
    stored, values = four_bits(generator)
    codes, table = torch.randint(256, (4,), generator=generator), torch.rand(256, generator=generator)
    unscaled = values.flatten() / stored[f"{NAME}.absmax"].repeat_interleave(BLOCK)
    scales = table[codes] * 0.7 + 0.3
    stored |= {
        f"{NAME}.absmax": codes.to(torch.uint8),
        f"{NAME}.nested_absmax": torch.tensor([0.7]),
        f"{NAME}.nested_quant_map": table,
        f"{NAME}.quant_state.bitsandbytes__nf4": state(nested_blocksize=NESTED, nested_offset=0.3),
    }
    return stored, (unscaled * scales.repeat_interleave(BLOCK)).view(16, 16)


def eight_bits(generator):
    codes = torch.randint(-127, 128, (16, 16), generator=generator)
    scales = torch.rand(16, generator=generator)
    stored = {
        NAME: codes.to(torch.int8),
        NAME.replace("weight", "SCB"): scales,
        NAME.replace("weight", "weight_format"): torch.tensor(0, dtype=torch.uint8),
    }
    return stored, torch.stack([codes[i] * scales[i] / 127 for i in range(16)])


@pytest.mark.parametrize("quantize", [four_bits, nested, eight_bits])
def test_the_values_are_those_of_the_codes(tmp_path, quantize):
    sizes = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    plain = save_base(LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **sizes)), tmp_path / "plain")
    adapter = train(plain, tmp_path / "adapter", LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"]))
    stored, values = quantize(torch.Generator().manual_seed(4))
    base = rewrite(plain, tmp_path / "base", stored, quantization_config={"quant_method": "bitsandbytes"})
    factors = load_file(adapter / "adapter_model.safetensors")
    prefix = "base_model.model." + NAME.removesuffix("weight")
    delta = 2 * factors[f"{prefix}lora_B.weight"] @ factors[f"{prefix}lora_A.weight"]
    found = check_layers(base, rewrite(plain, tmp_path / "merged", {NAME: values + delta}), adapter)
    assert (found["layers"], found["not_compared"]) == (1, {})
    assert found["layer_difference"] < 1e-6
    assert "quantized" in found["logits_missing"]
    assert check_layers(base, rewrite(plain, tmp_path / "wrong", {NAME: values}), adapter)["layer_difference"] > 0.02
