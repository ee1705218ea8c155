"""A language model to 4-bit, through the public command line: submit, watch, verdict, verify.

    make demo-llm

Quantizes SmolLM2-135M by GPTQ to compressed-tensors W4A16, evaluates the files that ship, downloads the signed output
to demo-llm-output/ and checks it offline.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples.job import ROOT, Example, documents

HERE = Path(__file__).parent
ASSETS = ROOT / "build/smollm2"


def example() -> Example:
    datasets = ("--train", ASSETS / "calibration", "--eval", ASSETS / "evaluation", "--probes", ASSETS / "probes")
    labels = ("--label", "project=smollm2", "--label", "environment=demo")
    arguments = (ASSETS / "model", *documents(HERE), *datasets, *labels)
    return Example(arguments, state=ROOT / "build/demo-llm", output=ROOT / "demo-llm-output")


def check_calibration(report: Mapping[str, Any]) -> None:
    """The demo fails where GPTQ gained nothing over rounding: then a stage of the path is broken."""
    quantized = next(stage for stage in report["stages"] if stage["method"] == "quantize_weights")
    worse = [layer["name"] for layer in quantized["layers"] if not layer["error"] < layer["rounding_error"]]
    if worse:
        raise SystemExit(f"GPTQ gained nothing over rounding in {', '.join(worse)}")


if __name__ == "__main__":
    check_calibration(example().run())
