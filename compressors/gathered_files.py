"""The tensors of several stored files in one file, or in few large ones: what ships of a quantized decoder.

    gathered = gather(base, [stored_tensor(base, tensor) for tensor in base.tensors.values()], job, monitor)

From store to store, hashed on the way: a tensor that is copied passes in pieces, one that is made anew is in memory as
a whole, a file never is. The order is fixed: tensors fill files as they come, and lie in `byte_order` inside a file.
After each file a checkpoint: a run after a kill goes on with the next file, to the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressors.folders import WEIGHTS, WEIGHTS_INDEX
from compressors.merged_folder import keep_others
from compressors.new_weight_files import byte_order, shard_index
from compressors.output_plan import OutputTensor, header_bytes
from compressors.stages import Monitor, Progress, StreamJob
from compressors.streaming import MergeOutcome
from compressors.weight_files import PIECE_BYTES, StoredTensor, WeightFiles, json_bytes
from modelpress.errors import InternalError
from modelpress.recipes import Export
from modelpress.reports import StageRecord
from modelpress.stored_folders import Sink

MAX_FILE_BYTES = 4_000_000_000


@dataclass(frozen=True)
class GatheredTensor:
    """One tensor of the output: what the header says of it, and its bytes, made when it is its turn."""

    output: OutputTensor
    pieces: Callable[[], Iterator[memoryview]]


@dataclass(frozen=True)
class Gathered:
    """The weight files that were written by path, their sizes in bytes, and warnings of files that were left out."""

    sizes: Mapping[str, int]
    warnings: tuple[str, ...]

    def record(self, arguments: Export, *, version: int, modules: Sequence[str], **details: Any) -> StageRecord:
        """The stage's record; `modules` are the quantized linear layers, `details` facts of the format."""
        return StageRecord(
            method="export",
            arguments=arguments.model_dump(mode="json"),
            version=version,
            touched=tuple(modules),
            details={"written_bytes": sum(self.sizes.values()), "weight_files": sorted(self.sizes), **details},
            warnings=self.warnings,
        )


def stored_tensor(base: WeightFiles, stored: StoredTensor) -> GatheredTensor:
    """A tensor of the base, byte for byte."""

    def pieces() -> Iterator[memoryview]:
        for start in range(0, stored.size_bytes, PIECE_BYTES):
            buffer = memoryview(bytearray(min(PIECE_BYTES, stored.size_bytes - start)))
            base.source.read_into(stored.path, stored.offset + start, buffer)
            yield buffer

    return GatheredTensor(OutputTensor(stored.name, stored.dtype, stored.shape, stored), pieces)


def made_tensor(name: str, make: Callable[[], Tensor], *, dtype: torch.dtype, shape: tuple[int, ...]) -> GatheredTensor:
    """A tensor that `make` gives, of this dtype and shape."""

    def pieces() -> Iterator[memoryview]:
        tensor = make()
        if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
            raise InternalError(f"tensor {name!r} was made as {tensor.dtype} {list(tensor.shape)}, not {dtype} {shape}")
        yield tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data

    return GatheredTensor(OutputTensor(name, dtype, shape, None), pieces)


def gather(
    base: WeightFiles,
    tensors: Sequence[GatheredTensor],
    job: StreamJob,
    monitor: Monitor,
    *,
    beside: Mapping[str, bytes] | None = None,
) -> Gathered:
    """Write `tensors` and the files `beside` them by path, and keep every other file of the base by its digest.

    The base's weights are read out of the files' order, so the caller verifies them first.
    """
    files = in_files(tensors)
    outcome = MergeOutcome.resumed(monitor.checkpoint())
    for step, (path, held) in enumerate(files.items(), 1):
        finished = outcome.files.get(path)
        if finished is None or not job.sink.keep(finished):
            _write_file(path, held, job.sink)
            outcome.files[path] = job.sink.entries[path]
            monitor.save_checkpoint(step, outcome.save)
        monitor.progress(Progress(step=step, steps=len(files)))
    small = {**(beside or {}), **_index(files)}
    for path, data in small.items():
        with job.sink.write(path) as write:
            write(data)
    warnings = keep_others(base, {*small, WEIGHTS_INDEX}, sink=job.sink)
    return Gathered({path: outcome.files[path].size_bytes for path in files}, warnings)


def in_files(tensors: Sequence[GatheredTensor]) -> dict[str, tuple[GatheredTensor, ...]]:
    """Path -> the tensors of that file in the order of their bytes; one file where they fit one.

    A tensor that is larger than MAX_FILE_BYTES has a file of its own.
    """
    groups: list[list[GatheredTensor]] = [[]]
    size = 0
    for tensor in tensors:
        size += tensor.output.size_bytes
        if groups[-1] and size > MAX_FILE_BYTES:
            groups.append([])
            size = tensor.output.size_bytes
        groups[-1].append(tensor)
    count = len(groups)
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    return {
        path: tuple(sorted(group, key=lambda tensor: byte_order(tensor.output)))
        for path, group in zip(names if count > 1 else [WEIGHTS], groups, strict=True)
    }


def _write_file(path: str, tensors: Sequence[GatheredTensor], sink: Sink) -> None:
    with sink.write(path) as write:
        write(header_bytes(tuple(tensor.output for tensor in tensors)))
        for tensor in tensors:
            for piece in tensor.pieces():
                write(piece)


def _index(files: Mapping[str, Sequence[GatheredTensor]]) -> dict[str, bytes]:
    """The shards' index by its path; nothing where there is one file."""
    if len(files) == 1:
        return {}
    weight_map = {tensor.output.name: path for path, tensors in files.items() for tensor in tensors}
    total = sum(tensor.output.size_bytes for tensors in files.values() for tensor in tensors)
    return {WEIGHTS_INDEX: json_bytes(shard_index(weight_map, total_bytes=total))}
