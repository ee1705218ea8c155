"""What a merge writes: which tensors in which file, and the headers, index and sizes that follow from it.

Format: https://huggingface.co/docs/safetensors. A file whose tensors keep names, dtypes and shapes keeps its header,
byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from compressors.changes import Change
from compressors.weight_files import DTYPE_NAMES, StoredTensor, WeightFile, WeightFiles, json_bytes, read_json

ALIGNMENT = 8


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of the output. Without a change its bytes are those of `stored`.

    `stored` is what the change begins with; None for a tensor that comes from the change alone. `decode` makes the
    base's values of the stored ones, where those are codes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stored: StoredTensor | None
    change: Change | None = None
    decode: Callable[[Tensor], Tensor] | None = None

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def is_copy(self) -> bool:
        return self.change is None

    def is_in(self, path: str) -> bool:
        """Whether the base stores it in that file, under the same name."""
        return self.stored is not None and (self.stored.name, self.stored.path) == (self.name, path)


@dataclass(frozen=True)
class OutputFile:
    """One file of the output: `tensors` in the order of their bytes; those of `origin` keep their order."""

    origin: WeightFile
    tensors: tuple[OutputTensor, ...]

    @property
    def path(self) -> str:
        return self.origin.path

    @property
    def is_kept(self) -> bool:
        """Whether the file is the stored one, byte for byte."""
        return self.keeps_header and all(tensor.is_copy for tensor in self.tensors)

    @property
    def keeps_header(self) -> bool:
        before = [(tensor.name, tensor.dtype, tensor.shape) for tensor in self.origin.tensors]
        return before == [(tensor.name, tensor.dtype, tensor.shape) for tensor in self.tensors]


@dataclass(frozen=True)
class OutputPlan:
    files: tuple[OutputFile, ...]

    @staticmethod
    def of(base: WeightFiles, changes: Mapping[str, Change], *, dtype: torch.dtype | None = None) -> OutputPlan:
        """The files of the base with these changes, each changed tensor in `dtype`, or in its own where it is None."""
        return OutputPlan(
            tuple(OutputFile(f, tuple(_output(t, changes.get(t.name), dtype) for t in f.tensors)) for f in base.files)
        )

    @property
    def tensors(self) -> tuple[OutputTensor, ...]:
        return tuple(tensor for file in self.files for tensor in file.tensors)

    def index(self, base: WeightFiles) -> bytes | None:
        """The shards' new index; None where the base has none, or keeps it."""
        if base.index is None or all(file.keeps_header for file in self.files):
            return None
        index = read_json(base.source, base.index)
        sizes = {"total_size": sum(t.size_bytes for t in self.tensors), "total_parameters": _parameters(self.tensors)}
        metadata = dict(index.get("metadata") or {})
        metadata |= {name: size for name, size in sizes.items() if name in metadata}
        weight_map = {tensor.name: file.path for file in self.files for tensor in file.tensors}
        return json_bytes({**index, "metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})


def header_bytes(tensors: tuple[OutputTensor, ...]) -> bytes:
    """The header of a file that holds these tensors one after the other: length, JSON, spaces up to the alignment."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.size_bytes
        entries[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _output(stored: StoredTensor, change: Change | None, dtype: torch.dtype | None) -> OutputTensor:
    kept = stored.dtype if change is None or dtype is None else dtype
    return OutputTensor(stored.name, kept, stored.shape, stored, change)


def _parameters(tensors: tuple[OutputTensor, ...]) -> int:
    return sum(prod(tensor.shape) for tensor in tensors)
