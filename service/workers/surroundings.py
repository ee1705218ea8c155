"""What a worker process sees of the machine: its environment variables, its folders, its session."""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path

KEPT = ("PATH", "HOME", "LANG", "TZ", "USER", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "XDG_CACHE_HOME")
KEPT_PREFIXES = ("LC_", "PYTHON", "OMP_", "MKL_", "CUDA_", "NVIDIA_", "AWS_", "AZURE_", "GOOGLE_", "MODELPRESS_KILL_")
"""Credentials of the object store are among them, because workers read and write it; nothing else secret is."""

SET: Mapping[str, str] = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "ORT_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
"""torchao asks `torch.cuda.is_available()` on import, which must not initialise CUDA before the fork; nothing is
fetched from the network, and nothing is reported to it (ONNX Runtime's builds would, by default, and keep a device id
in the user's cache folder); logs have no progress bars; cuBLAS is deterministic."""

_PR_SET_PDEATHSIG = 1


def clean_environment() -> None:
    """Leave only what a worker needs in `os.environ`, and set what its libraries need."""
    for name in list(os.environ):
        if name not in KEPT and not name.startswith(KEPT_PREFIXES):
            del os.environ[name]
    os.environ.update(SET)


def enter(scratch: Path) -> None:
    """Make this process a session of its own that works in `scratch` and dies with the process that started it."""
    os.setsid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.umask(0o077)
    os.chdir(scratch)
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
