"""Tiny models, adapters and merges as folders: merged by PEFT in FP32, or rewritten by formulas in the tests."""

from __future__ import annotations

import json
import shutil
import warnings
from functools import partial
from pathlib import Path

import torch
import transformers
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from evaluators.merge_check import CheckedAdapter, CheckSetting, MergedModels, StoredModel, check_merge
from modelpress.merge_recipes import MergeLora
from service.storage.store import ContentStore
from service.storage.stored_folders import StoredFolder

GIB = 1 << 30


class CountedFolder(StoredFolder):
    """A folder in a content store beside it that remembers how many bytes each read took."""

    def __init__(self, folder: Path):
        store = ContentStore(str(folder.parent / "store"), scratch=folder.parent / "scratch")
        super().__init__(store.put_folder(folder), store)
        self.bytes_read = []

    def read_into(self, path, offset, buffer):
        self.bytes_read.append(len(buffer))
        super().read_into(path, offset, buffer)


def save_base(model, folder, *, dtype=torch.float32):
    """`model` with seeded weights that are no special ones: biases and norms included."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            parameter.copy_(centre + 0.2 * torch.randn(parameter.shape, generator=generator))
    model.to(dtype).save_pretrained(folder)
    return folder


def load(folder):
    config = json.loads((folder / "config.json").read_text())
    model = getattr(transformers, config["architectures"][0])
    return model.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def quiet():
    """PEFT's warnings on tied weights and what it saves beside them, and on its own use of transformers."""
    return warnings.catch_warnings(action="ignore")


def train(base, folder, config, *, seed=5):
    """An adapter as after training: every tensor of it random."""
    with quiet():
        model = get_peft_model(load(base), config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(folder)
    return folder


def merge_by_peft(base, adapter, folder, *, dtype=torch.float32):
    """PEFT's own merge, in FP32, rounded once."""
    with quiet():
        merged = PeftModel.from_pretrained(load(base), adapter).merge_and_unload()
        merged.to(dtype).save_pretrained(folder)
    return folder


def rewrite(base, folder, tensors, **config):
    """The folder `base` with other tensors and other fields in its config."""
    shutil.copytree(base, folder)
    stored = load_file(base / "model.safetensors") | tensors
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    settings = json.loads((base / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def check_layers(base, merged, *adapters, **options):
    """The same without logits."""
    return check(base, merged, *adapters, memory_limit_bytes=100_000_000, **options)


def check(base, merged, *adapters, weights=(), memory_limit_bytes=4 * GIB, progress=lambda *_: None, **arguments):
    """`check_merge` on folders; adapters have weight 1 unless `weights` says otherwise."""
    checked = [
        CheckedAdapter(f"a{i}", folder, weight)
        for i, (folder, weight) in enumerate(zip(adapters, weights or [1.0] * len(adapters), strict=True))
    ]
    return check_merge(
        MergedModels(*(StoredModel(CountedFolder(folder), partial(Path, folder)) for folder in (base, merged))),
        checked,
        arguments=MergeLora(**arguments),
        setting=CheckSetting(seed=3, device="cpu", memory_limit_bytes=memory_limit_bytes, progress=progress),
    )
