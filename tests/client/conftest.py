"""A real server in a process of its own, and a TCP proxy that cuts connections where a test says so.

server          one running server that the whole session shares
start_server    start_server(data) -> RunningServer, for tests that stop or kill it
proxy           proxy(server) -> CuttingProxy in front of it
patient         a RetryPolicy that reconnects quickly
"""

import os
import socket
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
        started.append(launch(data, **environment))
        return started[-1]

    yield start
    for running in started:
        running.kill()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = launch(tmp_path_factory.mktemp("client") / "data")
    yield running
    running.process.terminate()
    assert running.process.wait(START_S) == 0


class CuttingProxy:
    """Forwards TCP to `target`. With `cut_after_bytes` set, cuts every connection once that much went one way."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.cut_after_bytes: int | None = None
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
            for way in ((client, upstream, "up_bytes"), (upstream, client, "down_bytes")):
                threading.Thread(target=self._forward, args=way, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, counter: str) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
                setattr(self, counter, getattr(self, counter) + len(data))
                if self.cut_after_bytes is not None and getattr(self, counter) >= self.cut_after_bytes:
                    self.cut_after_bytes = None
                    self.cuts += 1
                    self.cut()
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
