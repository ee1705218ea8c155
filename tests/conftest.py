"""One place that says why a marked test is skipped, whichever way pytest was started."""

from __future__ import annotations

import importlib.util
import os
import signal

import pytest

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # read when ONNX Runtime is first imported, here or in a server of a test

# A shell starts background jobs with SIGINT ignored, and commands inherit that: those that a test interrupts must not.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu = next((item for item in items if "gpu" in item.keywords), None)
    reasons = {} if gpu is None or has_cuda() else {"gpu": "needs a CUDA device"}
    if "slow" not in config.option.markexpr:
        reasons["slow"] = "takes longer than the everyday suite allows: make test-slow"
    for item in items:
        for mark, reason in reasons.items():
            if mark in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))


def has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
