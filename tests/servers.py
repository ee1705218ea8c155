"""A real server in a process of its own on a loopback port."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
START_S = 90.0
WITHOUT_WORKERS = {"MODELPRESS_WORKERS_SLOTS": "0"}


@dataclass(frozen=True)
class RunningServer:
    address: str
    process: subprocess.Popen[bytes]
    data: Path
    log: Path

    def stop(self) -> int:
        """SIGTERM, and the exit code of the graceful end."""
        self.process.terminate()
        return self.process.wait(START_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(START_S)

    def died(self) -> int:
        """The exit code of an end that the test did not ask for."""
        return self.process.wait(START_S)


def launch(data: Path, toml: str = "", **environment: str) -> RunningServer:
    """Start `python -m service` on a free port and wait until it says its address.

    Without workers, unless the environment sets MODELPRESS_WORKERS_SLOTS: their start takes seconds of computing.
    """
    data.mkdir(parents=True, exist_ok=True)
    config, ready, log = (data.with_suffix(suffix) for suffix in (".toml", ".ready", ".log"))
    config.write_text(toml)
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "service", "--config", str(config), "--data", str(data)]
    command += ["--port", "0", "--ready-file", str(ready)]
    with log.open("ab") as sink:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | WITHOUT_WORKERS | environment, stdout=sink, stderr=sink
        )
    deadline = time.monotonic() + START_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"the server did not start (exit code {process.wait()}):\n{log.read_text()}")
        time.sleep(0.02)
    return RunningServer(ready.read_text(), process, data, log)


@contextmanager
def servers() -> Iterator[Callable[..., RunningServer]]:
    """`launch`, and what it started is killed at the end."""
    started: list[RunningServer] = []

    def start(data: Path, toml: str = "", **environment: str) -> RunningServer:
        started.append(launch(data, toml, **environment))
        return started[-1]

    try:
        yield start
    finally:
        for running in started:
            running.kill()
