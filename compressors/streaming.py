"""The merge engine: shard by shard from store to store, hashed on the way in and on the way out.

    outcome = merge_files(base, plan, job, monitor)

Reading, arithmetic and writing overlap. A tensor that changes is in memory as a whole in its stored dtype, a few of its
rows in FP32; everything else passes in pieces. Each value is rounded once, from FP32 to the output's dtype. A file
that changes nothing is kept by its digest and not read. After each file a checkpoint: a merge that is run again after
a kill goes on with the next one, to the same bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from compressors.changes import Scratch
from compressors.output_plan import OutputFile, OutputPlan, OutputTensor, header_bytes
from compressors.overlap import Pool, ahead, behind
from compressors.rounding import Rounding, TensorRecord, row_blocks
from compressors.stages import Monitor, Progress, StreamJob
from compressors.weight_files import WeightFiles
from modelpress.digests import Digest
from modelpress.errors import DataLoss, InternalError
from modelpress.manifests import FileEntry
from modelpress.stored_folders import FileStream, Sink

PIECE_BYTES = 1 << 20
"""What goes to the disk at once: it is hashed and written while the processor's cache holds it."""
DEPTH = 2
WHOLE_TENSORS = 2
"""Changing tensors in memory at once: one is worked on, one is read. Their memory is used again."""
_PROGRESS = "merge.json"


@dataclass
class MergeOutcome:
    """Every tensor that was to change, and every finished file that was written."""

    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)

    @staticmethod
    def resumed(folder: Path | None) -> MergeOutcome:
        """What an earlier attempt had finished; nothing where there was none."""
        if folder is None:
            return MergeOutcome()
        value = json.loads((folder / _PROGRESS).read_text())
        files = (FileEntry(f["path"], f["size_bytes"], Digest(f["digest"])) for f in value["files"])
        tensors = {name: TensorRecord(**record) for name, record in value["tensors"].items()}
        return MergeOutcome(tensors, {entry.path: entry for entry in files})

    def save(self, folder: Path) -> None:
        files = [{"path": e.path, "size_bytes": e.size_bytes, "digest": str(e.digest)} for e in self.files.values()]
        tensors = {name: asdict(record) for name, record in self.tensors.items()}
        (folder / _PROGRESS).write_text(json.dumps({"files": files, "tensors": tensors}))


def merge_files(base: WeightFiles, plan: OutputPlan, job: StreamJob, monitor: Monitor) -> MergeOutcome:
    """Write every weight file of `plan`. InvalidModel where a value does not fit its dtype, DataLoss where the stored
    bytes of the base are no longer those of its digests.
    """
    outcome = MergeOutcome.resumed(monitor.checkpoint())
    steps = len(plan.files)
    with _one_thread():
        for step, file in enumerate(plan.files, 1):
            finished = outcome.files.get(file.path)
            if file.is_kept:
                keep(base.source.files[file.path], job.sink)
            elif finished is None or not job.sink.keep(finished):
                _Shard(base, file, job).merge_into(outcome)
                monitor.save_checkpoint(step, outcome.save)
            monitor.progress(Progress(step=step, steps=steps))
    return outcome


@contextmanager
def _one_thread() -> Iterator[None]:
    """Reading and writing have the other cores: threads that wait for small blocks would take them away."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keep(entry: FileEntry, sink: Sink) -> None:
    """Take over a file of the base; DataLoss where the store no longer has it."""
    if not sink.keep(entry):
        raise DataLoss(f"{entry.path} of the base is no longer in the store: upload the base again")


@dataclass(frozen=True)
class _Piece:
    """Bytes to be written, and the buffer to give back afterwards: where they are more than fit, it only counts."""

    data: Tensor
    buffer: Tensor


@dataclass(frozen=True)
class _Whole:
    """A tensor that changes, its stored values, and the memory that they may be in."""

    output: OutputTensor
    stored: Tensor
    memory: Scratch


class _Shard:
    """One file on its way from store to store."""

    def __init__(self, base: WeightFiles, file: OutputFile, job: StreamJob) -> None:
        self._base = base
        self._file = file
        self._job = job
        buffers = (torch.empty(PIECE_BYTES, dtype=torch.uint8) for _ in range(2 * (DEPTH + 2)))
        self._pool = Pool(buffers)
        """Enough for two full lanes and one piece in the hands at each end."""
        self._room = Pool(Scratch(torch.uint8) for _ in range(WHOLE_TENSORS))
        self._written = 0

    def merge_into(self, outcome: MergeOutcome) -> None:
        records: dict[str, TensorRecord] = {}
        path = self._file.path
        with self._base.source.stream(path) as stream, self._job.sink.write(path) as write:
            with (
                behind(partial(self._write, write), depth=DEPTH) as put,
                closing(ahead(self._read(stream), depth=DEPTH)) as items,
                self._pool,
                self._room,
            ):
                for item in items:
                    if isinstance(item, _Piece):
                        put(item)
                    else:
                        records[item.output.name] = self._merge(item.output, item.stored, put)
                        self._room.give(item.memory)
            self._check_size()
        outcome.tensors |= records
        outcome.files[path] = self._job.sink.entries[path]

    def _write(self, write: Callable[[memoryview], None], piece: _Piece) -> None:
        write(_bytes_of(piece.data))
        self._written += piece.data.numel()
        self._pool.give(piece.buffer)

    def _check_size(self) -> None:
        """The header promises so many bytes: a file with others would load nowhere."""
        file = self._file
        start = file.origin.data_start if file.keeps_header else len(header_bytes(file.tensors))
        promised = start + sum(tensor.size_bytes for tensor in file.tensors)
        if promised != self._written:
            raise InternalError(f"{self._written} bytes were made for {file.path!r}, whose header says {promised}")

    def _merge(self, tensor: OutputTensor, stored: Tensor, put: Callable[[_Piece], None]) -> TensorRecord:
        rounding = Rounding(tensor, stored)
        # half a piece or more at once, several blocks in each
        for start, stop in row_blocks(tensor.shape, elements=PIECE_BYTES // (2 * tensor.dtype.itemsize)):
            rows = (stop - start, *tensor.shape[1:])
            piece = self._piece(math.prod(rows) * tensor.dtype.itemsize)
            rounding.round_into(piece.data.view(tensor.dtype).reshape(rows), start)
            put(piece)
        return rounding.record()

    def _read(self, stream: FileStream) -> Iterator[_Piece | _Whole]:
        """The file's tensors in their order: pieces of those that stay, whole ones of those that change."""
        origin = self._file.origin
        head = bytearray(origin.data_start)
        stream.read_into(memoryview(head))
        yield from self._copied(bytes(head) if self._file.keeps_header else header_bytes(self._file.tensors))
        here = {tensor.name: tensor for tensor in self._file.tensors if tensor.is_in(self._file.path)}
        for stored in origin.tensors:
            tensor = here.get(stored.name)
            if tensor is not None and tensor.is_copy:
                yield from self._streamed(stream, stored.size_bytes)
                continue
            if tensor is None:
                self._skip(stream, stored.size_bytes)
                continue
            memory = self._room.take()
            data = memory.take((stored.size_bytes,))
            stream.read_into(_bytes_of(data))
            yield _Whole(tensor, data.view(stored.dtype).reshape(stored.shape or (1,)), memory)
        stream.finish()
        for tensor in self._file.tensors:
            if tensor.name not in here:
                memory = self._room.take()
                yield _Whole(tensor, self._from_elsewhere(tensor), memory)

    def _from_elsewhere(self, tensor: OutputTensor) -> Tensor:
        """What a new tensor begins with: one that is stored under another name, verified first, or nothing."""
        if tensor.stored is None:
            return torch.empty(0, dtype=tensor.dtype)
        self._base.source.verify(tensor.stored.path)
        return self._base.load(tensor.stored.name)

    def _streamed(self, stream: FileStream, size: int) -> Iterator[_Piece]:
        while size:
            piece = self._piece(min(size, PIECE_BYTES))
            stream.read_into(_bytes_of(piece.data))
            size -= piece.data.numel()
            yield piece

    def _skip(self, stream: FileStream, size: int) -> None:
        """Read, and thereby verify, what the output does not have."""
        for piece in self._streamed(stream, size):
            self._pool.give(piece.buffer)

    def _copied(self, data: bytes) -> Iterator[_Piece]:
        for start in range(0, len(data), PIECE_BYTES):
            part = data[start : start + PIECE_BYTES]
            piece = self._piece(len(part))
            _bytes_of(piece.data)[:] = part
            yield piece

    def _piece(self, size: int) -> _Piece:
        buffer = self._pool.take()
        return _Piece(buffer[:size] if size <= PIECE_BYTES else torch.empty(size, dtype=torch.uint8), buffer)


def _bytes_of(data: Tensor) -> memoryview:
    return data.numpy().data
