"""Run one example as a person would: start the embedded service, submit, print the verdict, verify offline.

The service's state stays in build/, so that a second run is answered from the cache.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CLI = [sys.executable, "-m", "modelpress"]
START_TIMEOUT_S = 180
VERDICTS = {0: "APPROVED", 10: "REJECTED", 11: "INCONCLUSIVE"}


@dataclass(frozen=True)
class Example:
    """`arguments` are those of `modelpress submit`, without `--output`; `state` is the service's folder."""

    arguments: tuple[str | Path, ...]
    state: Path
    output: Path

    def run(self) -> Mapping[str, Any]:
        """Take the example to its verdict and verify it; returns report.json. SystemExit where a step goes wrong, or
        the candidate is rejected.
        """
        start = time.monotonic()
        shutil.rmtree(self.output, ignore_errors=True)
        key = self.state / "public-key.pem"
        with self._service() as address:
            environment = {**os.environ, "MODELPRESS_ADDRESS": address}
            code = show("submit", *self.arguments, "--output", self.output, environment=environment)
            if code not in VERDICTS:
                raise SystemExit(f"submit ended with exit code {code}: see above and {self.state / 'service.log'}")
            show("key", "--output", key, environment=environment)
        verified = show("verify", self.output, "--key", key, "--allow-development-key", environment=environment)
        if verified != code:
            raise SystemExit(f"verify ended with exit code {verified}, submit with {code}")
        report: Mapping[str, Any] = json.loads((self.output / "report.json").read_text())
        if report["reused_from"]:
            print(f"\nEvery step was a cache hit: the figures are those of {report['reused_from']}.")
        print(f"\n{VERDICTS[code]} after {time.monotonic() - start:.0f} s. The report: {self.output / 'report.html'}")
        if code == 10:
            raise SystemExit("the candidate was rejected: the example's recipe does not keep its own policy")
        return report

    @contextmanager
    def _service(self) -> Iterator[str]:
        """The embedded service's address, while the block runs."""
        with tempfile.TemporaryDirectory() as folder:
            ready = Path(folder, "address")
            self.state.mkdir(parents=True, exist_ok=True)
            options = ["--data", str(self.state), "--port", "0", "--ready-file", str(ready)]
            with (self.state / "service.log").open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "service", *options], cwd=ROOT, stdout=log, stderr=log
                )
            try:
                yield self._wait_for(ready, process)
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(timeout=60)

    def _wait_for(self, ready: Path, process: subprocess.Popen[bytes]) -> str:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the service did not start: see {self.state / 'service.log'}")
            time.sleep(0.1)
        return ready.read_text().strip()


def show(*arguments: str | Path, environment: dict[str, str]) -> int:
    """Print a command as a person would type it, run it, return its exit code."""
    shown = " ".join(str(a.relative_to(ROOT) if isinstance(a, Path) else a) for a in arguments)
    print(f"\n$ modelpress {shown}", flush=True)
    return subprocess.run([*CLI, *map(str, arguments)], cwd=ROOT, env=environment, check=False).returncode


def documents(folder: Path) -> list[str]:
    """The options that name an example's recipe, evaluation and policy."""
    return [f"--{name}={(folder / f'{name}.yaml').relative_to(ROOT)}" for name in ("recipe", "evaluation", "policy")]
