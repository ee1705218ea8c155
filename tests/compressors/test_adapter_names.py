"""Wrappers around an adapter's names are taken off where they are wrappers, and only there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.compressors.lora_merges import PREFIX, QUERY, Bases, Bench, delta, factors, write_adapter
from tests.compressors.stored_models import same

PLAIN = factors(QUERY, 32, 32)


def renamed(old: str, new: str) -> dict[str, torch.Tensor]:
    return {name.replace(old, new): tensor for name, tensor in PLAIN.items()}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("base_model.", "_orig_mod.base_model."),
        ("base_model.", "module.base_model."),
        ("base_model.", "module._orig_mod.base_model."),
        ("base_model.", "_orig_mod.module.base_model."),
        ("base_model.", "_fsdp_wrapped_module._orig_mod.module.base_model."),
        (PREFIX, f"{PREFIX}_orig_mod."),
        (PREFIX, f"{PREFIX}_fsdp_wrapped_module."),
        ("layers.0.", "layers.0._fsdp_wrapped_module."),
        ("layers.0.", "layers.0._orig_mod._fsdp_wrapped_module."),
        ("layers.0.self_attn.", "_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.self_attn._orig_mod."),
        ("q_proj.lora", "q_proj._orig_mod.lora"),
        ("base_model.model.", "module.base_model.model._orig_mod."),
    ],
)
def test_wrappers_change_nothing(old: str, new: str, bases: Bases, bench: Bench, tmp_path: Path) -> None:
    wrapped = write_adapter(tmp_path / "wrapped", renamed(old, new), target_modules=[QUERY])
    plain = write_adapter(tmp_path / "plain", PLAIN, target_modules=[QUERY])
    base = bases.folder("llama")

    assert same(bench.merge(base, wrapped).tensors, bench.merge(base, plain).tensors)


@pytest.mark.parametrize("prefix", ["_orig_mod.base_model.", "module.base_model."])
def test_two_names_of_one_tensor_collide_where_they_differ(prefix, bases: Bases, bench: Bench, tmp_path: Path) -> None:
    wrapped = renamed("base_model.", prefix)
    other = {name: tensor + 1 if "lora_A" in name else tensor.clone() for name, tensor in wrapped.items()}
    collision = write_adapter(tmp_path / "collision", PLAIN | other, target_modules=[QUERY])
    copies = {name: tensor.clone() for name, tensor in wrapped.items()}
    twice = write_adapter(tmp_path / "twice", PLAIN | copies, target_modules=[QUERY])

    message = bench.refused(bases.folder("llama"), collision).message

    name = f"base_model.model.{QUERY}.lora_A.weight"
    assert all(part in message for part in (name, name.replace("base_model.", prefix, 1), "differ", "save")), message
    assert bench.merge(bases.folder("llama"), twice).record.touched == (f"{QUERY}.weight",)


@pytest.mark.parametrize("module", ["encoder.module", "module", "module.encoder", "module.module"])
def test_a_submodule_called_module_keeps_its_name(module: str, bench: Bench, tmp_path: Path) -> None:
    base, lora = plain_model(tmp_path / "base", module), factors(module, 6, 5)
    adapter = write_adapter(tmp_path / "adapter", lora, target_modules=[module])

    merged = bench.merge(base, adapter).tensors

    torch.testing.assert_close(merged[f"{module}.weight"], 1 + 2 * delta(lora, module), rtol=0, atol=1e-6)


def test_a_wrapper_inside_is_no_reason_to_guess(bench: Bench, tmp_path: Path) -> None:
    """`module.` inside a name may be the model's own: it is never taken off there."""
    base = plain_model(tmp_path / "base", "encoder.linear")
    lora = factors("encoder.module.linear", 6, 5)
    adapter = write_adapter(tmp_path / "adapter", lora, target_modules=["linear"])

    assert "encoder.module.linear" in bench.refused(base, adapter).message


def test_an_adapter_in_shards_is_one_adapter(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    whole = write_adapter(tmp_path / "whole", PLAIN, target_modules=[QUERY])
    parts = write_adapter(tmp_path / "parts", PLAIN, target_modules=[QUERY])
    (parts / "adapter_model.safetensors").unlink()
    names = [f"adapter_model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for path, name in zip(names, sorted(PLAIN), strict=True):
        save_file({name: PLAIN[name]}, parts / path)
    index = {"metadata": {}, "weight_map": dict(zip(sorted(PLAIN), names, strict=True))}
    (parts / "adapter_model.safetensors.index.json").write_text(json.dumps(index))

    assert same(*(bench.merge(bases.folder("llama"), adapter).tensors for adapter in (whole, parts)))


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_missing_file_is_named(file: str, bases: Bases, bench: Bench, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", PLAIN, target_modules=[QUERY])
    (adapter / file).rename(adapter / "adapter_model.bin")

    message = bench.refused(bases.folder("llama"), adapter).message

    assert all(part in message for part in (file, "missing", "save")), message


def test_an_adapter_of_no_tensors_is_refused(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", {}, target_modules=[QUERY])

    assert "no tensors" in bench.refused(bases.folder("llama"), adapter).message


def plain_model(folder: Path, module: str) -> Path:
    folder.mkdir()
    save_file({f"{module}.weight": torch.ones(6, 5)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "a_net"}))
    return folder
