"""What a worker leaves outside its own folders, and what it tells others: nothing."""

import subprocess
import sys
from pathlib import Path

from tests.servers import ROOT

IMPORT = "from service.workers.surroundings import clean_environment; clean_environment(); import onnxruntime"


def test_the_runtime_keeps_no_device_id_and_sends_no_reports(tmp_path: Path) -> None:
    """Its builds do both by default, from the import on."""
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", IMPORT], cwd=ROOT, env=environment, check=True)
    assert list(tmp_path.rglob("*")) == []
