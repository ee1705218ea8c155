"""Adapter folders in the form that PEFT itself reads: one file, and no names but PEFT's own.

PEFT passes over tensors whose names begin otherwise, and it reads no shards. Training wrappers leave their names in
what is saved through them (DistributedDataParallel, torch.compile, FSDP), and transformers writes large adapters in
shards.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_WRAPPED_PREFIX = re.compile(r"((_orig_mod|_fsdp_wrapped_module|module)\.)+(?=base_model\.)")
_WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module)\.")


@dataclass(frozen=True)
class CheckedAdapter:
    """A PEFT adapter folder, its name in the request and its weight in the merge."""

    name: str
    folder: Path
    weight: float


@contextmanager
def as_peft_reads(adapters: Sequence[CheckedAdapter]) -> Iterator[list[CheckedAdapter]]:
    """The adapters; those that PEFT would not read whole as copies, which are gone afterwards."""
    with TemporaryDirectory() as scratch:
        yield [_plain(adapter, Path(scratch) / str(number)) for number, adapter in enumerate(adapters)]


def _plain(adapter: CheckedAdapter, copy: Path) -> CheckedAdapter:
    files = sorted(adapter.folder.glob("adapter_model*.safetensors"))
    names = {name: file for file in files for name in _names(file)}
    if files == [adapter.folder / WEIGHTS] and all(name == _unwrapped(name) for name in names):
        return adapter
    copy.mkdir()
    shutil.copyfile(adapter.folder / CONFIG, copy / CONFIG)
    save_file({_unwrapped(name): _load(file, name) for name, file in names.items()}, copy / WEIGHTS)
    return replace(adapter, folder=copy)


def _unwrapped(name: str) -> str:
    prefix = _WRAPPED_PREFIX.match(name)
    return _WRAPPERS.sub("", name[prefix.end() :] if prefix else name)


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as tensors:
        return list(tensors.keys())


def _load(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as tensors:
        tensor: Tensor = tensors.get_tensor(name)
        return tensor
