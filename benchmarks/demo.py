"""The demo's conversion: what each stage cost, and the candidate beside ONNX Runtime's dynamic INT8 of the same model.

The conversion runs through the embedded service in a fresh data folder. The peer is made from the very FP32 export
that the service compares with. Candidate and peer are then measured in this process by the same evaluators, each
against that baseline; speed is paired with it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxruntime.quantization import quantize_dynamic

from benchmarks.embedded import ROOT, running
from benchmarks.table import Row, aimed, beside, write
from evaluators.drift import measure_drift
from evaluators.footprint import measure_footprint
from evaluators.latency import measure_latency
from evaluators.predictions import Predictions
from evaluators.runtimes import Resources
from evaluators.text_classification import compare, predict
from modelpress import Client
from modelpress.digests import Digest
from modelpress.evaluations import Latency, read_evaluation
from modelpress.manifests import ArtifactKind
from modelpress.metrics import Metric
from modelpress.requests import AdapterInput, ConversionRequest, Documents
from modelpress.views import StepFinished
from service.storage.store import ContentStore

EXAMPLE = ROOT / "examples/prompt_guard"
ASSETS = ROOT / "build/prompt_guard"
DATASETS = ("train", "validation", "test")
LATENCY = Latency(batch_sizes=(1,), sequence_lengths=(64,), warmup=20, repeats=200)
PEER = "ONNX Runtime dynamic INT8"


@dataclass(frozen=True)
class Figures:
    """A compressed model against the FP32 baseline."""

    size_ratio: float
    speedup: float
    accuracy: float
    accuracy_drop: float
    flips: int
    kl_mean: float
    kl_p99: float


def run() -> None:
    scratch = ROOT / "build/bench"
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        folder = Path(name)
        report = convert(folder)
        make_peer(folder / "baseline", folder / "peer")
        baseline = predictions(folder / "baseline")
        candidate, peer = (measure(folder, model, baseline) for model in ("candidate/model", "peer"))
    rows = [*stage_rows(report), *model_rows(candidate, peer)]
    write("demo", rows, threads=LATENCY.threads, repeats=LATENCY.repeats)


def convert(folder: Path) -> dict[str, Any]:
    """Run the example; leave its output in `candidate/` and the FP32 baseline's export in `baseline/`."""
    data = folder / "data"
    with running(data) as server, Client(server.address) as client:
        name = client.create_conversion(request(client)).name
        steps = [event.body for event in client.watch(name) if isinstance(event.body, StepFinished)]
        done = client.get(name)
        if not done.output:
            raise SystemExit(f"the conversion ended as {done.state.value}: {done.failure}")
        client.download(done.output, folder / "candidate")
    exported = next(Digest(step.digest) for step in steps if step.step == "export/baseline")
    store = ContentStore(str(data / "store"), scratch=folder / "scratch")
    store.fetch_folder(store.manifest(exported), folder / "baseline")
    report: dict[str, Any] = json.loads((folder / "candidate/report.json").read_bytes())
    return report


def request(client: Client) -> ConversionRequest:
    texts = {name: (EXAMPLE / f"{name}.yaml").read_text() for name in ("recipe", "policy", "evaluation")}
    datasets = {name: client.upload_folder(ASSETS / name, ArtifactKind.DATASET) for name in DATASETS}
    return ConversionRequest(
        Documents(**texts),
        base=client.upload_folder(ASSETS / "baseline", ArtifactKind.MODEL),
        adapters=(AdapterInput("guard", client.upload_folder(EXAMPLE / "adapter", ArtifactKind.ADAPTER)),),
        train=datasets["train"],
        validation=datasets["validation"],
        evaluation=datasets["test"],
    )


def make_peer(baseline: Path, output: Path) -> None:
    """ONNX Runtime's own dynamic quantization with its defaults, and the baseline's other files."""
    shutil.copytree(baseline, output, ignore=shutil.ignore_patterns("*.onnx*"))
    quantize_dynamic(baseline / "model.onnx", output / "model.onnx")


def predictions(model: Path) -> Predictions:
    return predict(
        model,
        data=ASSETS / "test",
        evaluation=read_evaluation((EXAMPLE / "evaluation.yaml").read_text()),
        resources=Resources(),
        progress=_ignore,
    )


def measure(folder: Path, model: str, baseline: Predictions) -> Figures:
    found = predictions(folder / model)
    paired = compare(baseline, found)
    drift = measure_drift(baseline, found, probes="", confidence=0.95)
    (latency,) = measure_latency(
        folder / "baseline", candidate=folder / model, latency=LATENCY, device="cpu", seed=0, progress=_ignore
    )
    return Figures(
        size_ratio=measure_footprint(folder / "baseline", candidate=folder / model).ratio,
        speedup=latency.speedup,
        accuracy=(paired.both_right + paired.only_candidate_right) / paired.n,
        accuracy_drop=paired.accuracy_drop,
        flips=drift.flips,
        kl_mean=_value(drift.kl_mean),
        kl_p99=_value(drift.kl_p99),
    )


def stage_rows(report: Mapping[str, Any]) -> list[Row]:
    rows = []
    for stage in report["stages"]:
        rows.append(Row(f"{stage['method']}: time", stage["seconds"], "s"))
        rows.append(Row(f"{stage['method']}: peak memory", stage["peak_memory_bytes"] / (1 << 20), "MiB"))
    return [*rows, aimed("whole conversion: time", report["seconds"], "s", aim="<= 360")]


def model_rows(candidate: Figures, peer: Figures) -> list[Row]:
    measures = (
        ("size / FP32 size", "size_ratio", "ratio", 1, "<= 0.30"),
        ("speed-up over FP32, batch 1, 64 tokens", "speedup", "ratio", 1, ">= 3.0"),
        ("accuracy", "accuracy", "%", 100, ""),
        ("accuracy drop", "accuracy_drop", "points", 100, "<= 1.0"),
        ("flips", "flips", "count", 1, ""),
        ("KL mean", "kl_mean", "nats", 1, ""),
        ("KL 99th percentile", "kl_p99", "nats", 1, ""),
    )
    return [
        beside(measure, scale * getattr(candidate, field), unit, peer=(PEER, scale * getattr(peer, field)), aim=aim)
        for measure, field, unit, scale, aim in measures
    ]


def _value(metric: Metric) -> float:
    if metric.value is None:
        raise SystemExit(f"{metric.name} could not be measured")
    return metric.value


def _ignore(done: int, total: int) -> None:
    """Nobody looks at the progress."""
