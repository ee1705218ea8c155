"""A 7B-shaped model under a limit of 6 GiB: rounded as a whole, and one layer by GPTQ, projected to all.

The weights are seeded noise, written by streaming; where the disk is too small there are as many layers as fit.
`BENCH_FOURBIT_LAYERS=4` rounds so many, to try the benchmark.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.embedded import ROOT
from benchmarks.merge_models import LLAMA_7B, Llama, write_base
from benchmarks.processes import Measured, measure
from benchmarks.table import Row, aimed, write
from service.storage.store import ContentStore

LIMIT_BYTES = 6 << 30
RESERVE_BYTES = 6_000_000_000
"""Of the disk, beside the model and what is made of it: codes in the store, exported codes, their copy."""
COPIES = 2
VOCABULARY = 49_152
"""The calibration texts' tokenizer knows so many tokens."""
ASSETS = ROOT / "build/smollm2"
THREADS = 2
STAGES = {
    "rounding g64": {"algorithm": "rtn", "group_size": 64, "clip_search": False},
    "GPTQ g64": {"algorithm": "gptq", "group_size": 64},
}


def run() -> None:
    scratch = Path(os.environ.get("TMPDIR", ROOT / "build/bench"))
    scratch.mkdir(parents=True, exist_ok=True)
    write("fourbit_large", list(rows(scratch)), threads=THREADS, repeats=1)


def rows(scratch: Path) -> Iterator[Row]:
    """The rounding of every layer that fits, then one layer of GPTQ."""
    model = replace(LLAMA_7B, vocabulary=VOCABULARY)
    layers = fitting(model, shutil.disk_usage(scratch).free - RESERVE_BYTES)
    rounded = model.with_layers(min(layers, int(os.environ.get("BENCH_FOURBIT_LAYERS", model.layers))))
    limit_mib = LIMIT_BYTES >> 20
    for name, measured_model in (("rounding g64", rounded), ("GPTQ g64", model.with_layers(1))):
        cost = quantized(measured_model, name, scratch)
        title = f"{measured_model.title}: {name}"
        yield aimed(f"{title}: peak memory, limit {limit_mib} MiB", cost.peak_mib, "MiB", aim=f"<= {limit_mib}")
        yield aimed(f"{title}: whole process", cost.whole_s, "s", aim="")
        if measured_model.layers < model.layers:
            projected = cost.whole_s * model.layers / measured_model.layers
            yield aimed(f"{title}: projected to {model.layers} layers", projected, "s", aim="")


def fitting(model: Llama, free_bytes: int) -> int:
    """How many of its layers the model can have so that it fits with what is made of it."""
    fit = (n for n in range(model.layers, 0, -1) if COPIES * model.with_layers(n).size_bytes <= free_bytes)
    return next(fit, 0)


def quantized(model: Llama, name: str, scratch: Path) -> Measured:
    with made(model, scratch) as (folder, digest):
        (folder / "base").symlink_to(ASSETS / "model")
        inputs = (folder / "store", digest, ASSETS / "calibration", folder / "output")
        stage = json.dumps({"scheme": "w4a16", **STAGES[name]})
        program = "benchmarks.fourbit_by_modelpress"
        return measure(program, *inputs, stage, str(THREADS), data_limit_bytes=LIMIT_BYTES)


@contextmanager
def made(model: Llama, scratch: Path) -> Iterator[tuple[Path, str]]:
    """The model in a store of its own, and its digest there; deleted when the block ends."""
    with tempfile.TemporaryDirectory(dir=scratch, prefix="large-") as temporary:
        folder = Path(temporary)
        store = ContentStore(str(folder / "store"), scratch=folder / "store/scratch")
        yield folder, str(write_base(model, store).digest)
