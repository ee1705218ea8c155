"""What the exported file must give: the compressed model's logits in torch, on texts that it was not trained on.

The evaluators run the same inputs through the file in its runtime and compare.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.fx import GraphModule

from compressors.batches import Examples, collate, encode, spread
from compressors.folders import load_tokenizer
from compressors.graph_capture import input_names, known_warnings
from compressors.int8_quantizer import linear_nodes
from compressors.measuring import MAX_LENGTH, random_examples
from compressors.stages import Job

PARITY_FILE = "parity.safetensors"
PARITY_ROWS = 128


def write_parity(reference: GraphModule, config: Any, job: Job, *, folder: Path) -> int:
    """Write `parity.safetensors`, the inputs [N, S] and the `logits` [N, C] of `reference`; N.

    The rows are held-out texts, evenly spaced, padded to the longest of them; without data, seeded random tokens.
    """
    examples = replace(_examples(config, job), input_names=input_names(config))
    inputs = dict(collate(examples, range(len(examples))).inputs)
    with torch.inference_mode():
        logits: Tensor = reference(*inputs.values())
    folder.mkdir(parents=True, exist_ok=True)
    save_file({**inputs, "logits": logits.contiguous()}, folder / PARITY_FILE)
    return len(examples)


def exact_sums(converted: GraphModule) -> GraphModule:
    """A copy whose linear layers add in FP64 and round once, as integer kernels do: their int32 sums are exact.

    With FP32 sums, one value in some thousands rounds to the other neighbour at the next quantizer.
    """
    with known_warnings():
        copied = copy.deepcopy(converted)
    for node in linear_nodes(copied):
        node.target = _linear_in_fp64
    copied.recompile()
    return copied


def _linear_in_fp64(inputs: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    bias = None if bias_O is None else bias_O.double()
    return nn.functional.linear(inputs.double(), weight_OI.double(), bias).float()


def _examples(config: Any, job: Job) -> Examples:
    if job.data is None:
        return random_examples(config, seed=job.seed)
    texts = encode(job.data.held_out, load_tokenizer(job.model), config=config, max_length=MAX_LENGTH)
    return spread(texts, limit=PARITY_ROWS)
