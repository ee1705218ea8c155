"""The service: how soon a queued conversion runs, and how fast bytes go in and out.

Start: from a conversion's acceptance until its first stage runs in its worker, both by the server's clock; the
worker processes are warm, no result is cached. Transfers: one model of 1 GiB through `modelpress.Client` over
loopback, in turn with the least that anybody must do who keeps the same bytes: hash them, write them, sync them.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.embedded import ROOT, Server, running
from benchmarks.table import Row, against, aimed, percentile_95, write
from benchmarks.tiny import WEIGHTS, stamp, write_dataset, write_model
from benchmarks.transfers import Round, measure_round
from modelpress import Client
from modelpress.manifests import ArtifactKind
from modelpress.requests import ConversionRequest, Documents
from modelpress.views import StepFinished

CONVERSIONS = 20
ROUNDS = 5
GIB = 1 << 30
ROWS_PER_GIB = GIB // 256
NEEDED_BYTES = 6 * GIB
STAGE_TIMEOUT_S = 120.0
WARM_UP = 2
"""Conversions before the first that counts: the first ever also waits for the workers' own start."""
DOCUMENTS = Documents(
    recipe="stages: [{method: prune, ratio: 0.5, importance: magnitude}, {method: export}]",
    policy="gates: {size: {max_ratio: 1.0}}",
    evaluation="{max_length: 64, latency: {sequence_lengths: [16]}}",
)
WITHOUT_WORKERS = {"MODELPRESS_WORKERS_SLOTS": "0"}
FLOOR = "write + fsync + SHA-256"


def run() -> None:
    scratch = ROOT / "build" / "bench"
    scratch.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(scratch).free
    if free < NEEDED_BYTES:
        raise SystemExit(f"{free >> 20} MiB are free below build/: this benchmark needs {NEEDED_BYTES >> 20}")
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        rows = [*start_rows(Path(folder) / "start"), *transfer_rows(Path(folder) / "transfers")]
    write("service", rows, threads=1, repeats=ROUNDS)


def start_rows(folder: Path) -> list[Row]:
    model, rows = write_model(folder / "model"), write_dataset(folder / "rows")
    with running(folder / "data") as server, Client(server.address) as client:
        names = convert(client, model=model, rows=rows)
        waits = queued_seconds(server)
    counted = [waits[name] for name in names[WARM_UP:]]
    return [
        Row(f"create to first stage, median of {CONVERSIONS}", statistics.median(counted), "s"),
        aimed(f"create to first stage, p95 of {CONVERSIONS}", percentile_95(counted), "s", aim="<= 0.3"),
    ]


def convert(client: Client, *, model: Path, rows: Path) -> list[str]:
    """Run the first stage of conversions, one after the other, each with a seed of its own: nothing is cached."""
    base, evaluation = client.upload_folder(model, ArtifactKind.MODEL), client.upload_folder(rows, ArtifactKind.DATASET)
    names = []
    for seed in range(WARM_UP + CONVERSIONS):
        request = ConversionRequest(DOCUMENTS, base=base, evaluation=evaluation, seed=seed)
        names.append(client.create_conversion(request).name)
        if not any(
            isinstance(event.body, StepFinished) for event in client.watch(names[-1], timeout_s=STAGE_TIMEOUT_S)
        ):
            raise SystemExit(f"{names[-1]} finished no stage: {client.get(names[-1]).failure}")
        client.cancel(names[-1])
        client.wait(names[-1])
    return names


def queued_seconds(server: Server) -> dict[str, float]:
    """Conversion's name -> seconds from its creation until its first step ran, from the server's log."""
    found: dict[str, float] = {}
    for line in server.log.read_text().splitlines():
        logged = json.loads(line) if line.startswith("{") else {}
        if logged.get("message") == "step runs":
            found.setdefault(f"conversions/{logged['conversion']}", logged["queued_s"])
    return found


def transfer_rows(folder: Path) -> list[Row]:
    model = write_model(folder / "model", vocabulary=ROWS_PER_GIB)
    with running(folder / "data", **WITHOUT_WORKERS) as server, Client(server.address) as client:
        resident = server.resident_bytes()
        server.reset_peak()
        rounds = []
        for number in range(ROUNDS):
            stamp(model / WEIGHTS, number)
            rounds.append(measure_round(client, model, folder))
            delete_large_blobs(folder / "data")
        growth = server.peak_bytes() - resident
    return [
        *speeds(rounds),
        aimed("server's memory, most above its start", growth / (1 << 20), "MiB", aim="<= 64"),
    ]


def speeds(rounds: Sequence[Round]) -> list[Row]:
    """MB/s from the medians of seconds over the rounds, in which every transfer met its own floor."""
    size = rounds[0].size_bytes / 1e6
    floor = statistics.median(turn.floor_s for turn in rounds)
    measures = (
        ("upload, send: from the first byte until it is stored", "send_s", ">= 0.6"),
        ("upload, whole: hash, send, look into every tensor", "upload_s", ">= 0.6"),
        ("download, whole: receive, hash, write", "download_s", ">= 0.6"),
    )
    rows = []
    for measure, field, aim in measures:
        seconds = statistics.median(getattr(turn, field) for turn in rounds)
        rows.append(against(measure, size / seconds, "MB/s", peer=FLOOR, peer_value=size / floor, aim=aim))
    return rows


def delete_large_blobs(data: Path) -> None:
    """Free the disk between two rounds, so that all of them find the same machine."""
    for file in (data / "store").rglob("*"):
        if file.is_file() and file.stat().st_size > GIB // 2:
            file.unlink()
