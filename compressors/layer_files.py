"""The weight files of a quantized decoder: one for what is outside its layers, then one for each layer.

model-00001-of-00003.safetensors    embeddings, last norm, head
model-00002-of-00003.safetensors    layer 0
model-00003-of-00003.safetensors    layer 1
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressors.decoder_layers import DecoderLayers
from compressors.folders import CONFIG, WEIGHTS_INDEX
from compressors.merged_folder import keep_others
from compressors.new_weight_files import byte_order, shard_index
from compressors.output_plan import OutputTensor, header_bytes
from compressors.weight_files import PIECE_BYTES, WeightFiles, json_bytes
from modelpress.stored_folders import Sink


@dataclass(frozen=True)
class Written:
    """Bytes of all weight files, and a warning for each file of the base that was left out."""

    weight_bytes: int
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class LayerFiles:
    """Which tensors of the base belong to which of the output's files."""

    decoder: DecoderLayers

    @property
    def outside_path(self) -> str:
        return self._path(1)

    @property
    def paths(self) -> tuple[str, ...]:
        """One for each decoder layer."""
        return tuple(self._path(number + 2) for number in range(len(self.decoder)))

    def write_layer(self, number: int, tensors: Mapping[str, Tensor], *, sink: Sink) -> None:
        """These tensors, by their full names."""
        outputs = [OutputTensor(name, tensor.dtype, tuple(tensor.shape), None) for name, tensor in tensors.items()]
        write_tensors(outputs, tensors.__getitem__, path=self.paths[number], sink=sink)

    def write_rest(self, config: Mapping[str, Any], *, sink: Sink) -> Written:
        """Once every layer is there: what is outside, index, `config`, and every other file of the base, kept."""
        self._write_outside(sink)
        for path, value in {WEIGHTS_INDEX: self._index(sink), CONFIG: config}.items():
            with sink.write(path) as write:
                write(json_bytes(value))
        warnings = keep_others(self.decoder.files, (WEIGHTS_INDEX, CONFIG), sink=sink)
        size = sum(sink.entries[path].size_bytes for path in (self.outside_path, *self.paths))
        return Written(size, warnings)

    def _write_outside(self, sink: Sink) -> None:
        """What is in no decoder layer, byte for byte as the base has it."""
        inside = {name for number in range(len(self.decoder)) for name in self.decoder.stored_names(number)}
        outputs = [
            OutputTensor(stored.name, stored.dtype, stored.shape, None)
            for stored in self.decoder.files.tensors.values()
            if stored.name not in inside
        ]
        write_tensors(outputs, self.decoder.files.load, path=self.outside_path, sink=sink)

    def _index(self, sink: Sink) -> dict[str, Any]:
        written = sink.written()
        files = [WeightFiles.of_file(written, path) for path in (self.outside_path, *self.paths)]
        stored = [tensor for file in files for tensor in file.tensors.values()]
        paths = {tensor.name: tensor.path for tensor in stored}
        return shard_index(paths, total_bytes=sum(tensor.size_bytes for tensor in stored))

    def _path(self, position: int) -> str:
        return f"model-{position:05}-of-{len(self.decoder) + 1:05}.safetensors"


def write_tensors(outputs: Sequence[OutputTensor], load: Callable[[str], Tensor], *, path: str, sink: Sink) -> None:
    """One safetensors file, one tensor of `load` in memory at a time."""
    ordered = tuple(sorted(outputs, key=byte_order))
    with sink.write(path) as write:
        write(header_bytes(ordered))
        for output in ordered:
            data = load(output.name).cpu().contiguous().reshape(-1).view(torch.uint8)
            for piece in torch.split(data, PIECE_BYTES):
                write(piece.numpy().data)
