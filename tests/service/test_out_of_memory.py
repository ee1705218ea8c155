"""A model that runs into the memory limit is not a bad model, whichever runtime says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from modelpress.errors import InvalidModel
from service.workers.limits import is_out_of_memory
from tests.compressors.decoders import make_decoder
from tests.compressors.exported_decoders import exported_family

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("runtime", ["transformers", "onnxruntime"])
def test_a_batch_beyond_the_limit_is_no_fault_of_the_model(tmp_path, runtime):
    """In a process of its own: 64 MiB more than it has, and logits of 128 MiB."""
    folder = make_decoder(tmp_path / "model") if runtime == "transformers" else exported_family("llama").folder
    program = f"""
import torch
from pathlib import Path
from evaluators.language_models import open_language_model
from evaluators.runtimes import Resources
from service.workers.limits import is_out_of_memory, limit_memory
model = open_language_model(Path({str(folder)!r}), Resources())
ids_BT = torch.ones(2, 4, dtype=torch.int64)
model.logits(ids_BT, ids_BT)
ids_BT = ids_BT.repeat(4096, 8)
pages = int(Path("/proc/self/statm").read_text().split()[5])
limit_memory(4096 * pages + (64 << 20))
try:
    model.logits(ids_BT, ids_BT)
except Exception as error:
    print(type(error).__name__, is_out_of_memory(error))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["InvalidModel", "True"]


def test_a_fault_of_the_model_is_one_whatever_it_was_raised_from():
    try:
        raise InvalidModel("its shapes disagree") from RuntimeError("shapes do not match")
    except InvalidModel as error:
        assert not is_out_of_memory(error)
