"""`python -m benchmarks.merge_by_peft BASE ADAPTER OUTPUT THREADS`: what PEFT's documentation says to do."""

from __future__ import annotations

import sys

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from benchmarks.processes import clock, say


def main(base: str, adapter: str, output: str, threads: str) -> None:
    begun = clock()
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    merged = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    merged.save_pretrained(output, max_shard_size="1GB")
    say(begun)


if __name__ == "__main__":
    main(*sys.argv[1:])
