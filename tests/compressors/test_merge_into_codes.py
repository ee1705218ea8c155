"""A weight that is stored as codes is no weight: nothing is added to it, whatever the config says of quantization."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from peft import IA3Config, get_peft_model
from safetensors.torch import save_file
from torch import Tensor

from tests.compressors.lora_merges import (
    ADAPTER,
    PREFIX,
    QUERY,
    Bases,
    Bench,
    factors,
    quiet_peft,
    randomise,
    save,
    write_adapter,
)
from tests.compressors.stored_models import weights_of

CODES = (torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2)
WEIGHT = f"{QUERY}.weight"


def base_with(bases: Bases, folder: Path, tensor: Tensor) -> Path:
    """A base whose query weight of the first layer is this, and whose config knows nothing of it."""
    shutil.copytree(bases.folder("llama"), folder)
    save_file(weights_of(folder) | {WEIGHT: tensor}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("dtype", CODES, ids=str)
@pytest.mark.parametrize("way", ["factors", "whole", "ia3"])
def test_a_change_of_codes_is_refused(way: str, dtype: torch.dtype, bases: Bases, bench: Bench, tmp_path: Path) -> None:
    base = base_with(bases, tmp_path / "base", (torch.arange(32.0 * 32) % 7).reshape(32, 32).to(dtype))
    if way == "ia3":
        settings = IA3Config(target_modules=["q_proj"], feedforward_modules=[])
        with quiet_peft():
            adapter = save(randomise(get_peft_model(bases.model("llama"), settings), seed=1), tmp_path / "adapter")
    else:
        other = QUERY.replace("layers.0", "layers.1")
        changed = factors(QUERY, 32, 32) if way == "factors" else {f"{PREFIX}{WEIGHT}": torch.ones(32, 32)}
        fields = {} if way == "factors" else {"modules_to_save": ["layers.0.self_attn.q_proj"]}
        adapter = write_adapter(
            tmp_path / "adapter", changed | factors(other, 32, 32), target_modules=["q_proj"], **fields
        )
    assert (adapter / ADAPTER).exists()

    error = bench.refused(base, adapter)

    assert all(part in error.message for part in (WEIGHT, str(dtype).removeprefix("torch."), "full-precision"))
    assert error.reason == "QUANTIZED_BASE"


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_codes_that_nothing_changes_keep_their_bytes(
    dtype: torch.dtype, bases: Bases, bench: Bench, tmp_path: Path
) -> None:
    codes = (torch.arange(32.0 * 32) % 7).reshape(32, 32).to(dtype)
    lora = factors(QUERY.replace("q_proj", "v_proj"), 16, 32)
    adapter = write_adapter(tmp_path / "adapter", lora, target_modules=["layers.0.self_attn.v_proj"])

    merged = bench.merge(base_with(bases, tmp_path / "base", codes), adapter)

    assert merged.tensors[WEIGHT].dtype == dtype
    assert torch.equal(merged.tensors[WEIGHT].view(torch.uint8), codes.view(torch.uint8))
