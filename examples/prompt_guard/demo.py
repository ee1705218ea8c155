"""The main job on a real model, through the public command line: submit, watch, verdict, verify.

    make demo

Starts the embedded service (SQLite, a local folder, a local worker) on a free loopback port, compresses a
prompt-injection guard, downloads the signed output to demo-output/ and checks it offline. The service's state
stays in build/demo, so a second run is answered from the cache.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ASSETS = ROOT / "build/prompt_guard"
STATE = ROOT / "build/demo"
OUTPUT = ROOT / "demo-output"
CLI = [sys.executable, "-m", "modelpress"]
START_TIMEOUT_S = 180
VERDICTS = {0: "APPROVED", 10: "REJECTED", 11: "INCONCLUSIVE"}


@contextmanager
def service() -> Iterator[str]:
    """The embedded service's address, while the block runs."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder, "address")
        STATE.mkdir(parents=True, exist_ok=True)
        with (STATE / "service.log").open("ab") as log:
            command = [sys.executable, "-m", "service", "--data", str(STATE), "--port", "0", "--ready-file", str(ready)]
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        try:
            yield wait_for(ready, process)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)


def wait_for(ready: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the service did not start: see {STATE / 'service.log'}")
        time.sleep(0.1)
    return ready.read_text().strip()


def show(*arguments: str | Path, environment: dict[str, str]) -> int:
    """Print a command as a person would type it, run it, return its exit code."""
    shown = " ".join(str(a.relative_to(ROOT) if isinstance(a, Path) else a) for a in arguments)
    print(f"\n$ modelpress {shown}", flush=True)
    return subprocess.run([*CLI, *map(str, arguments)], cwd=ROOT, env=environment, check=False).returncode


def submit(environment: dict[str, str]) -> int:
    training = ["--train", ASSETS / "train", "--validation", ASSETS / "validation"]
    datasets = [*training, "--eval", ASSETS / "test", "--probes", ASSETS / "probes"]
    texts = [f"--{name}={(HERE / f'{name}.yaml').relative_to(ROOT)}" for name in ("recipe", "evaluation", "policy")]
    labels = ["--label", "project=prompt-guard", "--label", "owner=platform-ml", "--label", "environment=demo"]
    adapter = f"--adapter=guard={(HERE / 'adapter').relative_to(ROOT)}"
    output = ["--output", OUTPUT]
    return show("submit", ASSETS / "baseline", adapter, *texts, *datasets, *labels, *output, environment=environment)


def check_recovery(report: dict) -> None:
    """The demo fails where recovery gained nothing measurable: then a stage of the path is broken."""
    recover = next(stage for stage in report["stages"] if stage["method"] == "recover")
    if not recover["after"]["kl"] < recover["before"]["kl"]:
        raise SystemExit(f"recovery gained nothing: KL {recover['before']['kl']:.4f} -> {recover['after']['kl']:.4f}")


def main() -> None:
    start = time.monotonic()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    with service() as address:
        environment = {**os.environ, "MODELPRESS_ADDRESS": address}
        code = submit(environment)
        if code not in VERDICTS:
            raise SystemExit(f"submit ended with exit code {code}: see above and {STATE / 'service.log'}")
        key = STATE / "public-key.pem"
        show("key", "--output", key, environment=environment)
    verified = show("verify", OUTPUT, "--key", key, "--allow-development-key", environment=environment)
    if verified != code:
        raise SystemExit(f"verify ended with exit code {verified}, submit with {code}")
    report = json.loads((OUTPUT / "report.json").read_text())
    check_recovery(report)
    if report["reused_from"]:
        print(f"\nEvery step was a cache hit: the figures are those of {report['reused_from']}.")
    print(f"\n{VERDICTS[code]} after {time.monotonic() - start:.0f} s. The report: {OUTPUT / 'report.html'}")
    if code == 10:
        raise SystemExit("the candidate was rejected: the demo's recipe does not keep its own policy")


if __name__ == "__main__":
    main()
