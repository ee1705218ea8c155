"""The tensors of a model folder on this machine, read one at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evaluators.runtimes import read_config
from evaluators.stored_weights import DTYPES, StoredTensor
from modelpress.errors import InvalidModel
from modelpress.manifests import check_relative_path
from modelpress.safetensors_header import read_header

INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class LocalWeights:
    """The config and the tensors of `model.safetensors`, or of the shards that its index names."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, folder: Path) -> LocalWeights:
        """Read the headers only. InvalidModel where a file is missing or bad, or a tensor is stored twice."""
        tensors: dict[str, StoredTensor] = {}
        for path in _weight_files(folder):
            for name, tensor in _tensors_of(folder, path).items():
                if name in tensors:
                    raise InvalidModel(
                        f"tensor {name!r} is stored in {tensors[name].path} and in {path}: once is right"
                    )
                tensors[name] = tensor
        return cls(folder, read_config(folder), tensors)

    def load(self, name: str) -> Tensor:
        """The tensor in its stored dtype, on the CPU; InvalidModel where there is none or torch lacks the dtype.

        Its bytes are read, not mapped: each private map of a file counts whole against a worker's memory limit.
        """
        if name not in self.tensors:
            raise InvalidModel(f"the model's files have no tensor {name!r}: save the model again", field=name)
        stored = self.tensors[name]
        if stored.dtype not in DTYPES:
            raise InvalidModel(f"{stored.path}: tensor {name!r} of dtype {stored.dtype} cannot be read", field=name)
        dtype = DTYPES[stored.dtype]
        if not stored.elements:
            return torch.empty(stored.shape, dtype=dtype)
        data = torch.empty(stored.elements * dtype.itemsize, dtype=torch.uint8)
        with (self.folder / stored.path).open("rb") as file:
            file.seek(stored.offset)
            if file.readinto(data.numpy().data) != len(data):
                raise InvalidModel(f"{stored.path} ends inside tensor {name!r}: save the model again", field=name)
        return data.view(dtype).reshape(stored.shape)


def _weight_files(folder: Path) -> list[str]:
    if not (folder / INDEX_FILE).is_file():
        return ["model.safetensors"]
    try:
        paths = sorted(set(json.loads((folder / INDEX_FILE).read_bytes())["weight_map"].values()))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InvalidModel(f"{INDEX_FILE} has no readable `weight_map`", field=INDEX_FILE) from error
    for path in paths:
        check_relative_path(path)
    return paths


def _tensors_of(folder: Path, path: str) -> dict[str, StoredTensor]:
    file = folder / path
    if not file.is_file():
        raise InvalidModel(f"the model folder has no {path}: save the model with save_pretrained", field=path)
    with file.open("rb") as opened:

        def read(offset: int, length: int) -> bytes:
            opened.seek(offset)
            return opened.read(length)

        header = read_header(read, size_bytes=file.stat().st_size, name=path)
    return {
        entry.name: StoredTensor(path, header.data_start + entry.begin, entry.dtype, entry.shape)
        for entry in header.tensors
    }
