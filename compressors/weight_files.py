"""The safetensors of a stored model or adapter: every tensor located, read alone, never the model as a whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from modelpress.errors import InvalidModel
from modelpress.safetensors_header import Header, read_header
from modelpress.stored_folders import Source
from modelpress.strict_json import JsonError, read_object

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""safetensors' names of the dtypes that are read; `DTYPE_NAMES` is its inverse."""
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
PIECE_BYTES = 1 << 20
"""Of one read or write, where a tensor or a file passes in pieces."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `size_bytes` from `offset` on in the file `path`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    path: str
    offset: int
    size_bytes: int

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class WeightFile:
    """One safetensors file: its tensors in the order of their bytes, the first of them at `data_start`."""

    path: str
    data_start: int
    tensors: tuple[StoredTensor, ...]


@dataclass(frozen=True)
class WeightFiles:
    """All files of one model or adapter, in the order of their names. `index` is the path of the shards' index."""

    source: Source
    files: tuple[WeightFile, ...]
    index: str | None

    @staticmethod
    def read(source: Source, stem: str = "model") -> WeightFiles:
        """Read the headers of `<stem>.safetensors`, or of the shards that its index names; InvalidModel else."""
        index = f"{stem}.safetensors.index.json"
        if index not in source.files:
            return WeightFiles(source, (_read_file(source, f"{stem}.safetensors"),), None)
        weight_map = read_json(source, index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(path, str) for path in weight_map.values()):
            raise InvalidModel(f"{index} has no `weight_map`: save the weights with save_pretrained", field=index)
        return WeightFiles(source, tuple(_read_file(source, path) for path in sorted(set(weight_map.values()))), index)

    @staticmethod
    def of_file(source: Source, path: str) -> WeightFiles:
        """One safetensors file of any name."""
        return WeightFiles(source, (_read_file(source, path),), None)

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        found: dict[str, StoredTensor] = {}
        for file in self.files:
            for tensor in file.tensors:
                if tensor.name in found:
                    raise InvalidModel(f"tensor {tensor.name!r} stands in two files of the model", field=file.path)
                found[tensor.name] = tensor
        return found

    def verify(self) -> None:
        """Read every file once: DataLoss where its bytes no longer have its digest."""
        for file in self.files:
            self.source.verify(file.path)

    def load(self, name: str) -> Tensor:
        """One tensor in its stored dtype, on the CPU. Its bytes are those of the file, verified or not."""
        stored = self.tensors[name]
        data = torch.empty(stored.size_bytes, dtype=torch.uint8)
        if stored.size_bytes:
            self.source.read_into(stored.path, stored.offset, data.numpy().data)
        return data.view(stored.dtype).reshape(stored.shape)


def read_json(source: Source, path: str) -> dict[str, Any]:
    """A file of the folder that holds one JSON object, verified; InvalidModel where it is missing or something else."""
    if path not in source.files:
        raise InvalidModel(f"{path} is missing: save the folder with save_pretrained", field=path)
    data = bytearray(source.files[path].size_bytes)
    with source.stream(path) as stream:
        stream.read_into(memoryview(data))
        stream.finish()
    try:
        return read_object(bytes(data))
    except JsonError as fault:
        raise InvalidModel(f"{path} {fault}", field=path) from None


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """As transformers writes its JSON files."""
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"


def _read_file(source: Source, path: str) -> WeightFile:
    if path not in source.files:
        raise InvalidModel(f"{path} is missing: save the weights as safetensors, with save_pretrained", field=path)

    def read(offset: int, length: int) -> bytes:
        data = bytearray(max(0, min(length, size - offset)))
        if data:
            source.read_into(path, offset, memoryview(data))
        return bytes(data)

    size = source.files[path].size_bytes
    header = read_header(read, size_bytes=size, name=path)
    return WeightFile(path, header.data_start, _located(path, header))


def _located(path: str, header: Header) -> tuple[StoredTensor, ...]:
    tensors = []
    for entry in header.tensors:
        if entry.dtype not in DTYPES:
            raise InvalidModel(f"tensor {entry.name!r} of {path} has dtype {entry.dtype}: it is not read", field=path)
        offset, size = header.data_start + entry.begin, entry.end - entry.begin
        tensors.append(StoredTensor(entry.name, DTYPES[entry.dtype], entry.shape, path, offset, size))
    return tuple(tensors)
