"""One child, asked at the server's start: is the preload there, and on what do workers compute?"""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from modelpress.errors import FailedPrecondition, InternalError
from modelpress.reports import Environment
from service.steps import Step
from service.workers.pool import PoolSettings, WorkerPool
from service.workers.protocol import send, versions_of

LIBRARIES = (
    "numpy",
    "onnx",
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxscript",
    "peft",
    "safetensors",
    "tokenizers",
    "torch",
    "torch-pruning",
    "torchao",
    "transformers",
)
"""What can change a result. A distribution that is not installed is left out."""

ISOLATION = (
    "each conversion runs in a process, session and scratch folder of its own with memory limits, as the service's own "
    "user: the signing key is not isolated from a worker that its model or a library has taken over"
)


@dataclass(frozen=True)
class WorkerFacts:
    """What a probe child found. `device` is what torch is told: `cpu` or `cuda`."""

    environment: Environment
    device: str
    operations: Mapping[str, int]
    """Name -> version of every operation."""

    def key_environment(self, step: Step) -> dict[str, Any]:
        """What belongs into the step's cache key beside the step itself."""
        if step.operation not in self.operations:
            known = ", ".join(sorted(self.operations))
            raise InternalError(f"step {step.name!r} wants the operation {step.operation!r}; known are {known}")
        environment = self.environment
        return {
            "operation_version": self.operations[step.operation],
            "versions": dict(environment.versions),
            "device": environment.device,
            "cpu_capability": environment.cpu_capability,
            "threads": environment.threads,
        }


def probe(pool: WorkerPool) -> WorkerFacts:
    """Start one child and ask it. This waits for the forkserver's imports.

    Raises FailedPrecondition where the preload is not there (a misspelt one is ignored silently by multiprocessing),
    where CUDA is initialised already, or where the configured device is missing.
    """
    worker = pool.start(report, pool.settings, pool.scratch / "probe")
    try:
        _, found = worker.receive()
    finally:
        worker.close()
    if not found["preloaded"]:
        raise FailedPrecondition(
            f"the forkserver did not import its preload {pool.settings.preload!r}: {found['why_not']}"
        )
    if found["cuda_initialised"]:
        raise FailedPrecondition("CUDA was initialised in the forkserver: no worker could use it")
    if found["device"] is None:
        raise FailedPrecondition("workers.device is 'cuda', and there is no CUDA device: set it to 'auto' or 'cpu'")
    environment = Environment(
        versions=found["versions"],
        device=found["device_name"],
        cpu_capability=found["cpu_capability"],
        threads=pool.settings.threads,
        isolation=ISOLATION,
    )
    return WorkerFacts(environment, found["device"], found["operations"])


def report(connection: Connection, settings: PoolSettings) -> None:
    """In the child: look around and tell."""
    preloaded = settings.preload in sys.modules
    torch = importlib.import_module("torch")
    initialised = torch.cuda.is_initialized()
    device = _device(settings.device, bool(torch.cuda.is_available()))
    found = {
        "preloaded": preloaded,
        "why_not": "" if preloaded else _why_not(settings.preload),
        "cuda_initialised": initialised,
        "device": device,
        "device_name": torch.cuda.get_device_name(0) if device == "cuda" else "cpu",
        "cpu_capability": cpu_capability(
            torch.backends.cpu.get_cpu_capability(), features=torch.cpu.get_capabilities()
        ),
        "versions": {"python": platform.python_version(), **_installed()},
        "operations": versions_of(settings.operations()),
    }
    send(connection, "found", found)


def cpu_capability(vectors: str, *, features: Mapping[str, Any]) -> str:
    """E.g. `AVX512 amx_bf16`: the vector instructions that torch uses, and whether training's products are bfloat16 on
    this CPU (`compressors.compute_types`), which the former do not tell.
    """
    return f"{vectors} amx_bf16" if features.get("amx_bf16") else vectors


def _why_not(preload: str) -> str:
    """multiprocessing ignores a preload that cannot be imported: import it again and say what is wrong."""
    try:
        importlib.import_module(preload)
    except Exception as error:  # noqa: BLE001 - told to the operator, who repairs the installation
        return f"{type(error).__name__}: {error}"
    return "another preload was set in this process"


def _device(wanted: str, has_cuda: bool) -> str | None:
    """What to compute on; None where it was asked for and is not there."""
    if wanted == "auto":
        return "cuda" if has_cuda else "cpu"
    return None if wanted == "cuda" and not has_cuda else wanted


def _installed() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
