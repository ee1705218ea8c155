"""A real server in a process of its own, and a TCP proxy that cuts connections where a test says so.

server          one running server that the whole session shares; it has no workers, so what is queued stays queued
start_server    start_server(data) -> RunningServer, for tests that stop or kill it
proxy           proxy(server) -> CuttingProxy in front of it
patient         a RetryPolicy that reconnects quickly
inputs          the folders and files of one tiny conversion
"""

import json
import math
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from modelpress.retries import RetryPolicy

ROOT = Path(__file__).parents[2]
START_S = 90.0
NO_WORKERS = {"MODELPRESS_WORKERS_SLOTS": "0"}


@dataclass(frozen=True)
class RunningServer:
    address: str
    process: subprocess.Popen[bytes]
    data: Path
    log: Path

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(START_S)


def launch(data: Path, **environment: str) -> RunningServer:
    """Start `python -m service` on a free port and wait until it says its address."""
    data.mkdir(parents=True, exist_ok=True)
    ready, log = data.with_suffix(".ready"), data.with_suffix(".log")
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "service", "--data", str(data), "--port", "0", "--ready-file", str(ready)]
    with log.open("ab") as sink:
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stdout=sink, stderr=sink)
    deadline = time.monotonic() + START_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"the server did not start (exit code {process.wait()}):\n{log.read_text()}")
        time.sleep(0.02)
    return RunningServer(ready.read_text(), process, data, log)


@pytest.fixture
def start_server() -> Iterator[Callable[..., RunningServer]]:
    started: list[RunningServer] = []

    def start(data: Path, **environment: str) -> RunningServer:
        started.append(launch(data, **(NO_WORKERS | environment)))
        return started[-1]

    yield start
    for running in started:
        running.kill()


@pytest.fixture(scope="module")
def launch_server() -> Iterator[Callable[..., RunningServer]]:
    """The same for a server that a whole module shares."""
    started: list[RunningServer] = []

    def start(data: Path, **environment: str) -> RunningServer:
        started.append(launch(data, **environment))
        return started[-1]

    yield start
    for running in started:
        running.kill()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = launch(tmp_path_factory.mktemp("client") / "data", **NO_WORKERS)
    yield running
    running.process.terminate()
    assert running.process.wait(START_S) == 0


class CuttingProxy:
    """Forwards TCP to `target`. `cut_up_at` and `cut_down_at`: total bytes of that way, towards the server or back,
    that are not reached; what would reach them is dropped and every connection is cut, once."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.cut_up_at = self.cut_down_at = math.inf
        self.up_bytes = self.down_bytes = 0
        self.cuts = 0
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        connections, self._open = self._open, []
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            host, _, port = self.target.rpartition(":")
            try:
                upstream = socket.create_connection((host, int(port)))
            except OSError:
                client.close()
                continue
            self._open += [client, upstream]
            for way in ((client, upstream, "up"), (upstream, client, "down")):
                threading.Thread(target=self._forward, args=way, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        counter, limit = f"{way}_bytes", f"cut_{way}_at"
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if getattr(self, counter) + len(data) > getattr(self, limit):
                    setattr(self, limit, math.inf)
                    self.cuts += 1
                    self.cut()
                sink.sendall(data)
                setattr(self, counter, getattr(self, counter) + len(data))
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy() -> Iterator[Callable[[RunningServer], CuttingProxy]]:
    started: list[CuttingProxy] = []

    def start(running: RunningServer) -> CuttingProxy:
        started.append(CuttingProxy(running.address))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def patient() -> RetryPolicy:
    return RetryPolicy(call_patience_s=30.0, stream_patience_s=90.0, first_delay_s=0.05, max_delay_s=0.5)


LABELS = ("benign", "injection")
WORDS = tuple(f"w{index}" for index in range(40))
VOCABULARY = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS)
HIDDEN, FFN, POSITIONS = 16, 32, 64

RECIPE = "stages:\n  - method: export\n"
POLICY = "gates:\n  size: {max_ratio: 1.05}\n  flips: {max_share: 0.05}\n"
EVALUATION = "max_length: 24\nlatency: {batch_sizes: [1], sequence_lengths: [8], warmup: 1, repeats: 3}\n"


def write_safetensors(file: Path, shapes: dict[str, tuple[int, ...]], seed: int = 0) -> None:
    """F32 tensors of small random numbers, without any framework."""
    header, body, generator = {}, bytearray(), random.Random(seed)
    for name, shape in shapes.items():
        values = [generator.gauss(0, 0.3) for _ in range(math.prod(shape))]
        begin = len(body)
        body += struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, len(body)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + body)


def bert_shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of a one-layer BERT classifier."""
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, outputs: int, inputs: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (outputs, inputs), (outputs,)

    def norm(name: str) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (HIDDEN,), (HIDDEN,)

    for table, rows in (("word", len(VOCABULARY)), ("position", POSITIONS), ("token_type", 2)):
        shapes[f"bert.embeddings.{table}_embeddings.weight"] = (rows, HIDDEN)
    norm("bert.embeddings.LayerNorm")
    layer = "bert.encoder.layer.0"
    for projection in ("self.query", "self.key", "self.value", "output.dense"):
        linear(f"{layer}.attention.{projection}", HIDDEN, HIDDEN)
    norm(f"{layer}.attention.output.LayerNorm")
    linear(f"{layer}.intermediate.dense", FFN, HIDDEN)
    linear(f"{layer}.output.dense", HIDDEN, FFN)
    norm(f"{layer}.output.LayerNorm")
    linear("bert.pooler.dense", HIDDEN, HIDDEN)
    linear("classifier", len(LABELS), HIDDEN)
    return shapes


def write_model(folder: Path) -> None:
    """A complete model folder: config, weights, tokenizer."""
    folder.mkdir()
    config = {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
        "vocab_size": len(VOCABULARY),
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": FFN,
        "max_position_embeddings": POSITIONS,
        "type_vocab_size": 2,
        "pad_token_id": 0,
        "id2label": {str(index): label for index, label in enumerate(LABELS)},
        "label2id": {label: index for index, label in enumerate(LABELS)},
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", bert_shapes())
    special = {name: f"[{name[:3].upper()}]" for name in ("pad_token", "unk_token", "cls_token", "sep_token")}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": POSITIONS, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]},
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {token: index for index, token in enumerate(VOCABULARY)},
            "unk_token": "[UNK]",
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def write_rows(folder: Path, rows: int, seed: int) -> None:
    """A labelled dataset of random words."""
    folder.mkdir()
    generator = random.Random(seed)
    texts = [" ".join(generator.choices(WORDS, k=generator.randint(1, 9))) for _ in range(rows)]
    lines = [json.dumps({"text": text, "label": LABELS[len(text) % 2]}) for text in texts]
    (folder / "rows.jsonl").write_text("\n".join(lines))


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/, eval/, train/, recipe.yaml, policy.yaml, evaluation.yaml: what `submit` needs. Read only."""
    root = tmp_path_factory.mktemp("inputs")
    write_model(root / "model")
    write_rows(root / "eval", rows=200, seed=1)
    write_rows(root / "train", rows=64, seed=2)
    for name, text in (("recipe", RECIPE), ("policy", POLICY), ("evaluation", EVALUATION)):
        (root / f"{name}.yaml").write_text(text)
    return root
