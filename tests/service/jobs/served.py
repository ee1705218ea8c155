"""A tiny server in a process of its own that a test may kill and start again, and a client with artifacts in it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from modelpress.client import Client
from modelpress.manifests import ArtifactKind
from modelpress.requests import ConversionRequest, Documents
from tests.service.intake.tiny import CONFIG, TOKENIZER, encode, jsonl, safetensors, tensors_of

ROOT = Path(__file__).parents[3]
START_S = 60.0
POLICY = "gates: {size: {max_ratio: 1.0}}"
RECIPE = "stages: [{method: export}]"
EVALUATION = "max_length: 8\nlatency: {sequence_lengths: [4], batch_sizes: [1]}"


def free_port() -> int:
    """A port that nobody listens on: a server that is killed comes back where clients look for it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class TinyServer:
    """`environment` is for one start only: a restarted server runs undisturbed."""

    data: Path
    process: subprocess.Popen[bytes] | None = None
    port: int = field(default_factory=free_port)

    def start(self, **environment: str) -> str:
        """Start it and return its address once it can be called."""
        ready = self.data.with_suffix(".ready")
        ready.unlink(missing_ok=True)
        with self.log.open("ab") as sink:
            self.process = subprocess.Popen(
                self.command(ready), cwd=ROOT, env=os.environ | environment, stdout=sink, stderr=sink
            )
        deadline = time.monotonic() + START_S
        while not ready.exists() and self.alive:
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)
        return ready.read_text() if ready.exists() else ""

    def command(self, ready: Path) -> list[str]:
        return [sys.executable, "-m", "tests.service.jobs.tiny_server", str(self.data), str(ready), str(self.port)]

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def log(self) -> Path:
        return self.data.with_suffix(".log")

    def end(self) -> int:
        """SIGTERM, and the exit code."""
        if self.process is None:
            return 0
        self.process.terminate()
        return self.process.wait(START_S)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(START_S)


class RealServer(TinyServer):
    """The service as people run it."""

    def command(self, ready: Path) -> list[str]:
        place = ["--data", str(self.data), "--port", str(self.port), "--ready-file", str(ready)]
        return [sys.executable, "-m", "service", *place]


def inputs(folder: Path) -> tuple[Path, Path]:
    """Folders of a sound tiny model and of four labelled rows."""
    model, rows = folder / "model", folder / "rows"
    files = {
        model / "config.json": encode(CONFIG),
        model / "model.safetensors": safetensors(tensors_of(CONFIG)),
        model / "tokenizer.json": encode(TOKENIZER),
        rows / "rows.jsonl": jsonl(*({"text": f"w{n}", "label": ("benign", "injection")[n % 2]} for n in range(4))),
    }
    for file, data in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return model, rows


def request(client: Client, folder: Path, **fields: object) -> ConversionRequest:
    """Upload the inputs and make a request of them."""
    model, rows = inputs(folder)
    base = client.upload_folder(model, ArtifactKind.MODEL)
    evaluation = client.upload_folder(rows, ArtifactKind.DATASET)
    documents = Documents(recipe=RECIPE, policy=POLICY, evaluation=EVALUATION)
    return ConversionRequest(documents, base=base, evaluation=evaluation, **fields)  # type: ignore[arg-type]
