"""Arithmetic in FP32 and one rounding: every merged tensor, bit for bit, in every dtype of base, adapter and output."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from compressors import rounding, streaming
from tests.compressors.lora_merges import (
    PREFIX,
    QUERY,
    Bases,
    Bench,
    delta,
    factors,
    save,
    tensors_of,
    train,
    write_adapter,
)
from tests.compressors.stored_models import Tensors, same, weights_of

SCALING = 16 / 4
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def expected(base: Tensors, adapter: Tensors, *, scaling: float, dtype: torch.dtype | None = None) -> Tensors:
    """Every tensor of the merged model, from `base` and the lora_A and lora_B of linear layers, all at once."""
    merged = dict(base)
    wide = {name: tensor.float() for name, tensor in adapter.items()}
    for name in adapter:
        if name.endswith("lora_A.weight"):
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            weight = base[f"{module}.weight"]
            merged[f"{module}.weight"] = (weight.float() + delta(wide, module) * scaling).to(dtype or weight.dtype)
    return merged


@pytest.mark.parametrize("output", ["stored", *DTYPES])
@pytest.mark.parametrize("stored", DTYPES)
def test_every_value_is_rounded_once(stored: str, output: str, bases: Bases, bench: Bench, tmp_path: Path) -> None:
    base = bases.folder("llama", dtype=DTYPES[stored])
    adapter = save(train(bases.model("llama"), target_modules="all-linear"), tmp_path / "adapter")

    merged = bench.merge(base, adapter, output_dtype=output)

    dtype = DTYPES.get(output)
    assert same(merged.tensors, expected(weights_of(base), tensors_of(adapter), scaling=SCALING, dtype=dtype))
    assert merged.config["dtype"] == (stored if output == "stored" else output)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_an_adapter_of_another_dtype_is_computed_with_in_fp32(dtype, bases: Bases, bench, tmp_path) -> None:
    base = bases.folder("llama", dtype=torch.bfloat16)
    exact = {name: tensor.bfloat16().to(dtype) for name, tensor in factors(QUERY, 32, 32).items()}
    adapter = write_adapter(tmp_path / "adapter", exact, target_modules=[QUERY])

    merged = bench.merge(base, adapter)

    assert same(merged.tensors, expected(weights_of(base), exact, scaling=2.0))


def test_small_changes_are_not_lost_in_bfloat16_on_the_way(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    """Rounding the change to BF16 before it is added gives other values: the test can tell."""
    base = bases.folder("llama", dtype=torch.bfloat16)
    small = {name: tensor * 0.2 for name, tensor in factors(QUERY, 32, 32).items()}
    adapter = write_adapter(tmp_path / "adapter", small, target_modules=[QUERY])

    merged = bench.merge(base, adapter).tensors[f"{QUERY}.weight"]

    weight = weights_of(base)[f"{QUERY}.weight"]
    assert torch.equal(merged, (weight.float() + 2 * delta(small, QUERY)).bfloat16())
    assert not torch.equal(merged, weight + (2 * delta(small, QUERY)).bfloat16())
    assert not torch.equal(merged, weight)


def test_an_fp64_tensor_keeps_its_precision(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    base = bases.folder("llama", dtype=torch.float64)
    lora = factors(QUERY, 32, 32)
    adapter = write_adapter(tmp_path / "adapter", lora, target_modules=[QUERY])

    merged = bench.merge(base, adapter).tensors[f"{QUERY}.weight"]

    weight = weights_of(base)[f"{QUERY}.weight"]
    assert merged.dtype == torch.float64
    torch.testing.assert_close(merged - weight, 2 * delta(lora, QUERY).double(), rtol=1e-5, atol=1e-8)
    assert not torch.equal(merged, merged.float().double())


def test_blocks_of_rows_give_the_bits_of_the_whole(bases: Bases, bench: Bench, tmp_path: Path, monkeypatch) -> None:
    """A tensor of many blocks, and of a number of rows that no block divides."""
    monkeypatch.setattr(rounding, "BLOCK_ELEMENTS", 1 << 10)
    monkeypatch.setattr(streaming, "PIECE_BYTES", 1 << 12)
    rows, columns = 87, 24
    base = tmp_path / "base"
    base.mkdir()
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(2)).bfloat16()
    save_file({"layer.weight": weight}, base / "model.safetensors")
    (base / "config.json").write_text(json.dumps({"model_type": "a_net"}))
    lora = factors("layer", rows, columns, rank=8)
    adapter = write_adapter(tmp_path / "adapter", lora, r=8, lora_alpha=20, target_modules=["layer"])

    merged = bench.merge(base, adapter).tensors["layer.weight"]

    assert torch.equal(merged, (weight.float() + 2.5 * delta(lora, "layer")).bfloat16())


@pytest.mark.parametrize(
    ("scale", "stored"), [(lambda a: a * 1e6, torch.float16), (lambda a: a * 1e30, torch.float16)], ids=["6e4", "1e30"]
)
def test_what_overflows_fp16_is_refused_and_fits_fp32(
    scale: Callable[[Tensor], Tensor], stored: torch.dtype, bases: Bases, bench: Bench, tmp_path: Path
) -> None:
    base = bases.folder("llama", dtype=stored)
    lora = {name: scale(tensor) if "lora_A" in name else tensor for name, tensor in factors(QUERY, 32, 32).items()}
    adapter = write_adapter(tmp_path / "adapter", lora, target_modules=[QUERY])
    weight = weights_of(base)[f"{QUERY}.weight"].float() + 2 * delta(lora, QUERY)

    error = bench.refused(base, adapter)

    assert error.reason == "OVERFLOW"
    assert all(part in error.message for part in (f"{QUERY}.weight", "float16", "output_dtype", "float32"))
    assert f"{float(weight.abs().max()):g}" in error.message
    wide = bench.merge(base, adapter, output_dtype="float32").tensors[f"{QUERY}.weight"]
    assert torch.equal(wide, weight)
