"""`python -m benchmarks.fourbit_by_llmcompressor BASE WINDOWS OUTPUT SETTINGS THREADS`: as its documentation says.

WINDOWS is a JSON list of token windows; SETTINGS names `algorithm` (rtn or gptq) and `group_size`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.processes import clock, say

MODIFIERS = {"rtn": QuantizationModifier, "gptq": GPTQModifier}


def main(base: str, windows: str, output: str, settings: str, threads: str) -> None:
    begun = clock()
    torch.set_num_threads(int(threads))
    wanted = json.loads(settings)
    ids = json.loads(Path(windows).read_text())
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": wanted["group_size"]}
    recipe = MODIFIERS[wanted["algorithm"]](
        config_groups={"group_0": {"targets": ["Linear"], "weights": weights}}, ignore=["lm_head"]
    )
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    data = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]})
    oneshot(model=model, dataset=data, recipe=recipe, max_seq_length=len(ids[0]), num_calibration_samples=len(ids))
    model.save_pretrained(output, save_compressed=True)
    AutoTokenizer.from_pretrained(base).save_pretrained(output)
    say(begun)


if __name__ == "__main__":
    main(*sys.argv[1:])
