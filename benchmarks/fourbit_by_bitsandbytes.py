"""`python -m benchmarks.fourbit_by_bitsandbytes BASE WINDOWS OUTPUT SETTINGS THREADS`: NF4 on loading, no calibration.

The dequantized values are written, in float32, before any forward pass: one would repack the weights.
"""

from __future__ import annotations

import sys

import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from benchmarks.processes import clock, say


def main(base: str, windows: str, output: str, settings: str, threads: str) -> None:
    begun = clock()
    torch.set_num_threads(int(threads))
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    quantized = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=config, device_map="cpu", dtype=torch.float32
    )
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for name, module in quantized.named_modules():
        if isinstance(module, Linear4bit):
            weight = dequantize_4bit(module.weight.data, module.weight.quant_state)
            model.get_submodule(name).weight.data.copy_(weight)
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(base).save_pretrained(output)
    say(begun)


if __name__ == "__main__":
    main(*sys.argv[1:])
