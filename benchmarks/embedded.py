"""The embedded service in a process of its own, in a data folder that is new unless it is given."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
START_S = 180.0
STOP_S = 60.0


@dataclass(frozen=True)
class Server:
    address: str
    pid: int
    log: Path
    """JSON lines."""

    def resident_bytes(self) -> int:
        """What the process has in memory now."""
        return self._status("VmRSS")

    def reset_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """The most that it had in memory since `reset_peak`."""
        return self._status("VmHWM")

    def _status(self, name: str) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


@contextmanager
def running(data: Path, **environment: str) -> Iterator[Server]:
    """`python -m service` on a free loopback port while the block runs; it must end in order."""
    data.mkdir(parents=True, exist_ok=True)
    ready, log = data / "address", data / "service.log"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "service", "--data", str(data), "--port", "0", "--ready-file", str(ready)]
    with log.open("ab") as sink:
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stdout=sink, stderr=sink)
    try:
        _wait(ready, process, log)
        yield Server(ready.read_text(), process.pid, log)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_S)


def _wait(ready: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the service did not start:\n{log.read_text()}")
        time.sleep(0.05)
