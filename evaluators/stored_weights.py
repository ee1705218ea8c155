"""A model folder's tensors, read one at a time by their ranges in the stored files.

The digests of the files are not looked at here: who stored them hashed them, and a local copy is verified when it is
made.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from modelpress.errors import InvalidModel
from modelpress.safetensors_header import DTYPE_BITS, read_header
from modelpress.stored_folders import Source

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


class NotComparable(Exception):
    """Why something stays outside the comparison; one line for the report."""


class OverMemoryLimit(NotComparable):
    """It would be compared under a higher memory limit."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `offset` counts from the start of the file `path`; `dtype` is safetensors' name."""

    path: str
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class Weights(Protocol):
    """The config and the tensors of one model, wherever they are stored."""

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...

    def load(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class StoredWeights:
    """The config and the tensors of `model.safetensors`, or of the shards that its index names."""

    source: Source
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, source: Source) -> StoredWeights:
        """Read the headers only. InvalidModel where a file is missing or no safetensors file."""
        tensors = {name: tensor for path in _weight_files(source) for name, tensor in _tensors_of(source, path).items()}
        return cls(source, _read_json(source, "config.json"), tensors)

    @property
    def parameters(self) -> int:
        return sum(tensor.elements for tensor in self.tensors.values())

    @property
    def stored_bytes(self) -> int:
        return sum(tensor.elements * DTYPE_BITS[tensor.dtype] // 8 for tensor in self.tensors.values())

    def load(self, name: str) -> Tensor:
        """The tensor in its stored dtype, on the CPU; NotComparable for a dtype that torch cannot compute with."""
        tensor = self.tensors[name]
        if tensor.dtype not in DTYPES:
            raise NotComparable(f"{name!r} is stored as {tensor.dtype}")
        dtype = DTYPES[tensor.dtype]
        if not tensor.elements:
            return torch.empty(tensor.shape, dtype=dtype)
        buffer = bytearray(tensor.elements * dtype.itemsize)
        self.source.read_into(tensor.path, tensor.offset, memoryview(buffer))
        return torch.frombuffer(buffer, dtype=dtype).view(tensor.shape)


def _weight_files(source: Source) -> list[str]:
    if "model.safetensors.index.json" not in source.files:
        return ["model.safetensors"]
    return sorted(set(_read_json(source, "model.safetensors.index.json")["weight_map"].values()))


def _tensors_of(source: Source, path: str) -> dict[str, StoredTensor]:
    size = _size(source, path)

    def read(offset: int, length: int) -> bytes:
        return _read(source, path, offset=offset, length=max(0, min(length, size - offset)))

    header = read_header(read, size_bytes=size, name=path)
    return {
        entry.name: StoredTensor(path, header.data_start + entry.begin, entry.dtype, entry.shape)
        for entry in header.tensors
    }


def _read_json(source: Source, path: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(_read(source, path, offset=0, length=_size(source, path)))
    return content


def _read(source: Source, path: str, *, offset: int, length: int) -> bytes:
    buffer = bytearray(length)
    source.read_into(path, offset, memoryview(buffer))
    return bytes(buffer)


def _size(source: Source, path: str) -> int:
    if path not in source.files:
        raise InvalidModel(f"the model folder has no {path}: save the model with save_pretrained", field=path)
    return source.files[path].size_bytes
