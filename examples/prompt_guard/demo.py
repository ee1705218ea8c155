"""The main job on a real model, through the public command line: submit, watch, verdict, verify.

    make demo

Starts the embedded service (SQLite, a local folder, a local worker) on a free loopback port, compresses a
prompt-injection guard, downloads the signed output to demo-output/ and checks it offline.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples.job import ROOT, Example, documents

HERE = Path(__file__).parent
ASSETS = ROOT / "build/prompt_guard"


def example() -> Example:
    training = ("--train", ASSETS / "train", "--validation", ASSETS / "validation")
    datasets = (*training, "--eval", ASSETS / "test", "--probes", ASSETS / "probes")
    labels = ("--label", "project=prompt-guard", "--label", "owner=platform-ml", "--label", "environment=demo")
    adapter = f"--adapter=guard={(HERE / 'adapter').relative_to(ROOT)}"
    arguments = (ASSETS / "baseline", adapter, *documents(HERE), *datasets, *labels)
    return Example(arguments, state=ROOT / "build/demo", output=ROOT / "demo-output")


def check_recovery(report: Mapping[str, Any]) -> None:
    """The demo fails where recovery gained nothing measurable: then a stage of the path is broken."""
    recover = next(stage for stage in report["stages"] if stage["method"] == "recover")
    if not recover["after"]["kl"] < recover["before"]["kl"]:
        raise SystemExit(f"recovery gained nothing: KL {recover['before']['kl']:.4f} -> {recover['after']['kl']:.4f}")


if __name__ == "__main__":
    check_recovery(example().run())
