"""`python -m benchmarks.fourbit_by_autoround BASE WINDOWS OUTPUT SETTINGS THREADS`: its defaults, on the same windows.

The dequantized values are written, in float32: what the judge compares are the values, not the layout.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from auto_round import AutoRound
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.processes import clock, say


def main(base: str, windows: str, output: str, settings: str, threads: str) -> None:
    begun = clock()
    torch.set_num_threads(int(threads))
    ids = json.loads(Path(windows).read_text())
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    rows = [
        {"input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, len(row), dtype=torch.long)} for row in ids
    ]
    rounding = AutoRound(
        model,
        tokenizer,
        bits=4,
        sym=True,
        group_size=json.loads(settings)["group_size"],
        dataset=rows,
        nsamples=len(ids),
        seqlen=len(ids[0]),
        device_map="cpu",
    )
    quantized, _ = rounding.quantize()
    quantized.float().save_pretrained(output)
    tokenizer.save_pretrained(output)
    say(begun)


if __name__ == "__main__":
    main(*sys.argv[1:])
