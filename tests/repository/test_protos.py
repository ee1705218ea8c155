"""The committed wire code is what the protos generate."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_generated_code_is_current(tmp_path):
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin/python"
    subprocess.run([python, "-m", "pip", "install", "-q", "-r", ROOT / "protos/requirements.txt"], check=True)
    made = tmp_path / "made"
    subprocess.run([python, ROOT / "protos/generate.py", ROOT / "protos", made], check=True, capture_output=True)
    committed = {file.name: file.read_bytes() for file in (ROOT / "modelpress/v1").glob("*_pb2*")}
    assert {file.name: file.read_bytes() for file in made.iterdir()} == committed
