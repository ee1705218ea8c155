"""Merging a LoRA: beside PEFT, beside copying and hashing the same files, and a model larger than the memory allowed.

Every figure is of a whole process that is started for it. On the smaller model PEFT, the stage and the copy take turns,
its files cached. The larger one is merged and copied once, read from the disk, the merge under a limit on its memory.
`BENCH_MERGE_LAYERS=2` gives both so many layers, to try the benchmark; where the disk is too small for all layers,
there are as many as fit. The rows say how many.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.embedded import ROOT
from benchmarks.merge_case import THREADS, Case
from benchmarks.merge_exact import Difference
from benchmarks.merge_models import LLAMA_1B, LLAMA_7B, Llama
from benchmarks.processes import Measured
from benchmarks.table import Row, against, aimed, beside, write

ROUNDS = 3
RESERVE_BYTES = 4_000_000_000
"""Of the disk, beside one model and what one program makes of it."""
LIMIT_BYTES = 2 << 30
PEERS = {"peft": "PEFT", "copy": "copy + fsync + SHA-256"}


def run() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    rows = [*rows_beside_peft(LLAMA_1B), *rows_under_limit(LLAMA_7B)]
    write("merge", rows, threads=THREADS, repeats=ROUNDS)


@contextmanager
def made(llama: Llama) -> Iterator[Case]:
    """The model with as many of its layers as are asked for and fit on the disk; deleted when the block ends."""
    scratch = Path(os.environ.get("TMPDIR", ROOT / "build/bench"))
    scratch.mkdir(parents=True, exist_ok=True)
    wanted = llama.with_layers(int(os.environ.get("BENCH_MERGE_LAYERS", llama.layers)))
    layers = fitting(wanted, shutil.disk_usage(scratch).free - RESERVE_BYTES)
    if not layers:
        raise SystemExit(f"{scratch} has no room for one layer of the model {llama.name} and its merge")
    with tempfile.TemporaryDirectory(dir=scratch, prefix="merge-") as folder:
        yield Case.make(llama.with_layers(layers), Path(folder))


def fitting(llama: Llama, free_bytes: int) -> int:
    """How many of its layers the model can have so that it fits twice."""
    fit = (layers for layers in range(llama.layers, 0, -1) if 2 * llama.with_layers(layers).size_bytes <= free_bytes)
    return next(fit, 0)


@dataclass(frozen=True)
class Round:
    """What the three cost in turn, and how far the two merges are from the definition, over all tensors."""

    peft: Measured
    modelpress: Measured
    copy: Measured
    peft_difference: Difference
    difference: Difference


def rows_beside_peft(llama: Llama) -> list[Row]:
    with made(llama) as case:
        rounds = [measure_round(case) for _ in range(ROUNDS)]
        title = case.llama.title
    return [*cost_rows(title, rounds), *exactness_rows(title, rounds)]


def measure_round(case: Case) -> Round:
    tensors = list(case.llama.tensors)
    peft = case.peft()
    peft_difference = case.difference("peft", tensors)
    case.remove("peft")
    modelpress = case.modelpress()
    difference = case.difference("modelpress", tensors)
    case.remove("modelpress")
    copy = case.copy()
    case.remove("copy")
    return Round(peft, modelpress, copy, peft_difference, difference)


def cost_rows(title: str, rounds: Sequence[Round]) -> list[Row]:
    """Medians over the rounds."""
    measures = (
        ("whole process", "whole_s", "s", "peft", "<= 0.2857"),
        ("imports", "imports_s", "s", "peft", ""),
        ("work alone", "work_s", "s", "peft", ""),
        ("peak memory", "peak_mib", "MiB", "peft", "<= 0.125"),
        ("whole process", "whole_s", "s", "copy", "<= 1.5"),
        ("work alone", "work_s", "s", "copy", "<= 1.5"),
        ("processor time", "cpu_s", "s", "copy", ""),
    )
    rows = []
    for measure, figure, unit, program, aim in measures:
        ours, theirs = (
            statistics.median(getattr(getattr(turn, of), figure) for turn in rounds) for of in ("modelpress", program)
        )
        rows.append(against(f"{title}: {measure}", ours, unit, peer=PEERS[program], peer_value=theirs, aim=aim))
    return rows


def exactness_rows(title: str, rounds: Sequence[Round]) -> list[Row]:
    """The worst of the rounds."""
    elements = max(turn.difference.elements for turn in rounds)
    theirs = max(turn.peft_difference.elements for turn in rounds)
    tensors = max(turn.difference.tensors for turn in rounds)
    return [
        beside(
            f"{title}: values unlike the FP32 reference", elements, "count", peer=(PEERS["peft"], theirs), aim="<= 0"
        ),
        aimed(f"{title}: other tensors that changed", tensors, "count", aim="<= 0"),
    ]


def rows_under_limit(llama: Llama) -> list[Row]:
    with made(llama) as case:
        case.forget()
        merged = case.modelpress(data_limit_bytes=LIMIT_BYTES)
        difference = case.difference("modelpress", sample(case.llama))
        case.remove("modelpress")
        case.forget()
        copied = case.copy()
    title, size_mb = case.llama.title, case.llama.size_bytes / 1e6
    limit_mib = LIMIT_BYTES >> 20
    speeds = [size_mb / measured.whole_s for measured in (merged, copied)]
    return [
        aimed(f"{title}: peak memory, limit {limit_mib} MiB", merged.peak_mib, "MiB", aim=f"<= {limit_mib}"),
        against(f"{title}: whole process", speeds[0], "MB/s", peer=PEERS["copy"], peer_value=speeds[1]),
        aimed(f"{title}: values unlike the FP32 reference, sampled", difference.elements, "count", aim="<= 0"),
        aimed(f"{title}: other tensors that changed, sampled", difference.tensors, "count", aim="<= 0"),
    ]


def sample(llama: Llama) -> list[str]:
    """The tensors of the first, the middle and the last layer, and those that are in none."""
    left_out = set(range(llama.layers)) - {0, llama.layers // 2, llama.layers - 1}
    prefixes = tuple(f"model.layers.{number}." for number in left_out)
    return [name for name in llama.tensors if not name.startswith(prefixes)]
