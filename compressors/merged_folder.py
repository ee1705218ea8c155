"""What stands beside a merged model's weights: its config, the shards' index, tokenizer and companions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from compressors.folders import CONFIG, FOREIGN_WEIGHTS
from compressors.output_plan import OutputPlan
from compressors.streaming import keep
from compressors.weight_files import WeightFiles, json_bytes, read_json
from modelpress.stored_folders import Sink

OUTPUT_DTYPES: Mapping[str, torch.dtype | None] = {
    "stored": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""By `output_dtype`; None: each tensor keeps its own."""


def write_beside(base: WeightFiles, plan: OutputPlan, *, config: Mapping[str, Any], sink: Sink) -> tuple[str, ...]:
    """Write `config` and the plan's index where they differ from the base's, and keep every other file of the base.

    Returns a warning for each file that is left out: weights that the merge did not read.
    """
    new = {} if config == read_json(base.source, CONFIG) else {CONFIG: json_bytes(config)}
    index = plan.index(base)
    if base.index is not None and index is not None:
        new[base.index] = index
    for path, data in new.items():
        with sink.write(path) as write:
            write(data)
    return keep_others(base, new, sink=sink)


def keep_others(base: WeightFiles, written: Collection[str], *, sink: Sink) -> tuple[str, ...]:
    """Keep every file of the base that is neither `written` nor weights.

    Returns a warning for each file that is left out: weights that were not read.
    """
    files = base.source.files
    weights = {file.path for file in base.files}
    stale = sorted(path for path in files if path.endswith((".safetensors", *FOREIGN_WEIGHTS)) and path not in weights)
    for path in sorted(files.keys() - {*written, *weights, *stale}):
        keep(files[path], sink)
    return tuple(f"{path} was left out: it holds the weights as they were before" for path in stale)


def with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """`config` with the dtype's name, e.g. `bfloat16`, under the key that it uses; `stored` leaves it alone."""
    if dtype == "stored":
        return dict(config)
    return {**config, "torch_dtype" if "torch_dtype" in config else "dtype": dtype}
