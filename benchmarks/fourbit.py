"""4-bit language models: ours beside llm-compressor, AutoRound, ONNX Runtime and bitsandbytes, under one judge.

Every contestant is a whole process with one thread, two at a time, so times are processor times. All are calibrated on
the same windows. Peers live in environments of their own where `benchmarks/peers/` says so. A contestant that is named
in `BENCH_FOURBIT` (comma-separated) runs, by default all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.embedded import ROOT
from benchmarks.fourbit_bases import GRAPH, write_rotated
from benchmarks.processes import Measured, measure
from benchmarks.table import Row, against, aimed, write
from compressors.calibration import read_windows
from compressors.stages import Calibration
from modelpress.quantization_recipes import QuantizeWeights
from service.storage.store import ContentStore

ASSETS = ROOT / "build/smollm2"
PEERS = ROOT / "build/peers"
THREADS = 1
AT_ONCE = 2
PLAIN_BASE, ROTATED_BASE = "SmolLM2-135M", "rotated"


@dataclass(frozen=True)
class Contestant:
    """`settings` are those of `quantize_weights`, or of a peer's program. `environment` is the peer's; empty: ours."""

    name: str
    program: str
    settings: Mapping[str, Any]
    environment: str = ""


def ours(name: str, **settings: Any) -> Contestant:
    return Contestant(name, "benchmarks.fourbit_by_modelpress", {"scheme": "w4a16", **settings})


def peer(name: str, environment: str, **settings: Any) -> Contestant:
    return Contestant(name, f"benchmarks.fourbit_by_{environment}", settings, environment)


HQQ = "ONNX Runtime HQQ g32 (asymmetric)"
"""Only on the rotated base: the other one lies on its grid."""
LONG = {"steps": 200, "batch_size": 4}
"""AutoRound's number of steps, half its windows in each."""
PLAIN = {"algorithm": "gptq", "clip_search": False, "refine_scales": False}
CONTESTANTS: Mapping[str, Contestant] = {
    contestant.name: contestant
    for contestant in (
        ours("QAT g64", algorithm="qat", group_size=64, calibration_samples=384, training={"steps": 360}),
        ours("GPTQ plain g32", **PLAIN, group_size=32),
        peer("llmcompressor GPTQ g32", "llmcompressor", algorithm="gptq", group_size=32),
        ours("GPTQ g32", algorithm="gptq", group_size=32),
        ours("SignRound g32", algorithm="signround", group_size=32),
        ours("SignRound long g32", algorithm="signround", group_size=32, training=LONG),
        peer("AutoRound g32", "autoround", group_size=32),
        ours("rounding g32", algorithm="rtn", clip_search=False, group_size=32),
        ours("rounding g64", algorithm="rtn", clip_search=False, group_size=64),
        peer("bitsandbytes NF4 64", "bitsandbytes"),
        peer("ONNX Runtime g32", "onnxruntime", algorithm="default", group_size=32),
        peer("ONNX Runtime g64", "onnxruntime", algorithm="default", group_size=64),
        peer("ONNX Runtime HQQ g64 (asymmetric)", "onnxruntime", algorithm="hqq", group_size=64),
        peer(HQQ, "onnxruntime", algorithm="hqq", group_size=32),
        ours("rounding with clipping g32", algorithm="rtn", group_size=32),
        ours("GPTQ g64", algorithm="gptq", group_size=64),
        ours("GPTQ plain g64", **PLAIN, group_size=64),
        peer("llmcompressor GPTQ g64", "llmcompressor", algorithm="gptq", group_size=64),
        ours("AWQ g32", algorithm="awq", group_size=32),
        ours("AWQ g64", algorithm="awq", group_size=64),
    )
}
"""In the order in which they start: ours beside its peer."""
ON_ROTATED = ("rounding g32", "bitsandbytes NF4 64", HQQ, "GPTQ g32", "SignRound g32", "AWQ g32")


@dataclass(frozen=True)
class Base:
    """A model, in a store and as a folder, with the windows that everybody calibrates on."""

    title: str
    folder: Path
    store: Path
    digest: str
    windows: Path

    @staticmethod
    def make(title: str, model: Path, scratch: Path) -> Base:
        scratch.mkdir()
        store = ContentStore(str(scratch / "store"), scratch=scratch / "store/scratch")
        digest = str(store.put_folder(model).digest)
        calibration = Calibration(ASSETS / "calibration", digest="", text_column="text", tokenizer=model)
        windows = scratch / "windows.json"
        windows.write_text(json.dumps(read_windows(calibration, QuantizeWeights(), seed=0).ids_NT.tolist()))
        (scratch / "base").symlink_to(model)
        measure("benchmarks.fourbit_graph", model, scratch / GRAPH)
        return Base(title, scratch / "base", scratch / "store", digest, windows)


@dataclass(frozen=True)
class Result:
    cost: Measured
    quality: Mapping[str, Any]


def run() -> None:
    """Every contestant on its bases; the results are written anew after each, so that a run may be stopped."""
    os.environ["OMP_NUM_THREADS"] = str(THREADS)
    scratch = Path(os.environ.get("TMPDIR", ROOT / "build/bench"))
    scratch.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Result]] = {PLAIN_BASE: {}, ROTATED_BASE: {}}
    with tempfile.TemporaryDirectory(dir=scratch, prefix="fourbit-") as temporary:
        bases = make_bases(Path(temporary))
        jobs = [*chosen(PLAIN_BASE, (name for name in CONTESTANTS if name != HQQ)), *chosen(ROTATED_BASE, ON_ROTATED)]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for (title, name), result in zip(jobs, pool.map(partial(measure_job, bases), jobs), strict=True):
                found[title][name] = result
                rows = [row for each, results in found.items() for row in table(each, results)]
                write("fourbit", rows, threads=THREADS, repeats=1)


def chosen(title: str, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    wanted = os.environ.get("BENCH_FOURBIT", "")
    only = [name.strip() for name in wanted.split(",")] if wanted else list(names)
    yield from ((title, name) for name in names if name in only)


def make_bases(folder: Path) -> dict[str, Base]:
    rotated = write_rotated(ASSETS / "model", folder / "rotated-model", seed=0)
    models = {PLAIN_BASE: ASSETS / "model", ROTATED_BASE: rotated}
    return {title: Base.make(title, model, folder / title) for title, model in models.items()}


def measure_job(bases: Mapping[str, Base], job: tuple[str, str]) -> Result:
    title, name = job
    return measure_one(bases[title], CONTESTANTS[name])


def make_environment(name: str) -> Path:
    """The interpreter of a peer's environment, made where it is not there yet; ours where it has no requirements."""
    requirements = ROOT / f"benchmarks/peers/{name}.txt"
    if not requirements.exists():
        return Path(sys.executable)
    python = PEERS / name / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(PEERS / name)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "-r", str(requirements)], check=True)
    return python


def measure_one(base: Base, contestant: Contestant) -> Result:
    output = base.store.parent / contestant.name.replace(" ", "-")
    settings = json.dumps(dict(contestant.settings))
    if contestant.environment:
        inputs = (base.folder, base.windows, output, settings, str(THREADS))
        cost = measure(contestant.program, *inputs, python=make_environment(contestant.environment))
    else:
        inputs = (base.store, base.digest, ASSETS / "calibration", output, settings, str(THREADS))
        cost = measure(contestant.program, *inputs)
    judged = measure("benchmarks.fourbit_judge", base.folder, output, ASSETS / "evaluation")
    print(base.title, contestant.name, f"{cost.cpu_s:.0f} s, {cost.peak_mib:.0f} MiB", dict(judged.said), flush=True)
    return Result(cost, judged.said)


def table(title: str, found: Mapping[str, Result]) -> Iterator[Row]:
    for name, result in found.items():
        for measure_name, unit in (("perplexity", ""), ("token_kl", "nats"), ("top1", "fraction")):
            yield aimed(f"{title}: {name}: {measure_name}", result.quality[measure_name], unit, aim="")
        yield aimed(f"{title}: {name}: processor time", result.cost.cpu_s, "s", aim="")
        yield aimed(f"{title}: {name}: peak memory", result.cost.peak_mib, "MiB", aim="")
    yield from aims(title, found)


AIMS = (
    ("GPTQ plain g32", "llmcompressor GPTQ g32", "token_kl", "<= 1.0"),
    ("GPTQ plain g32", "llmcompressor GPTQ g32", "cpu_s", "<= 0.5"),
    ("GPTQ plain g32", "llmcompressor GPTQ g32", "peak_mib", "<= 1.0"),
    ("GPTQ plain g64", "llmcompressor GPTQ g64", "token_kl", "<= 1.0"),
    ("GPTQ plain g64", "llmcompressor GPTQ g64", "cpu_s", "<= 0.5"),
    ("GPTQ plain g64", "llmcompressor GPTQ g64", "peak_mib", "<= 1.0"),
    ("GPTQ g32", "llmcompressor GPTQ g32", "token_kl", "<= 0.8"),
    ("GPTQ g64", "llmcompressor GPTQ g64", "token_kl", "<= 0.8"),
    ("SignRound g32", "AutoRound g32", "token_kl", "<= 1.0"),
    ("SignRound long g32", "AutoRound g32", "token_kl", "<= 1.0"),
    ("SignRound long g32", "AutoRound g32", "cpu_s", "<= 1.0"),
    ("QAT g64", "rounding g64", "token_kl", "<= 0.35"),
    ("AWQ g32", "rounding g32", "token_kl", "<= 1.0"),
    ("AWQ g64", "rounding g64", "token_kl", "<= 1.0"),
)
"""Ours, the peer, the figure, and the bound of its ratio."""


def aims(title: str, found: Mapping[str, Result]) -> Iterator[Row]:
    for name, other, figure, aim in AIMS:
        if name in found and other in found:
            values = [_figure(found[each], figure) for each in (name, other)]
            yield against(f"{title}: {name}: {figure}", values[0], "", peer=other, peer_value=values[1], aim=aim)


def _figure(result: Result, name: str) -> float:
    return float(result.quality[name] if name in result.quality else getattr(result.cost, name))
