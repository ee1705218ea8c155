"""What training environments install, and what serves requests, never imports torch."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "onnxruntime", "onnx", "torchao", "peft")


@pytest.mark.parametrize(
    "module", ["modelpress", "modelpress.client", "modelpress.cli", "service.__main__", "service.app"]
)
def test_importing_it_leaves_torch_out(module):
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
