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
from pathlib import Path

import torch
from torch import Tensor

from compressors.changes import Scratch, wide
from compressors.output_plan import OutputFile, OutputPlan, OutputTensor, header_bytes
from compressors.overlap import Pool, ahead, behind
from compressors.stages import Monitor, Progress, StreamJob
from compressors.weight_files import WeightFiles
from modelpress.digests import Digest
from modelpress.errors import DataLoss, InvalidModel
from modelpress.manifests import FileEntry
from modelpress.stored_folders import FileStream

PIECE_BYTES = 1 << 20
"""What goes to the disk at once: it is hashed and written while the processor's cache holds it."""
BLOCK_ELEMENTS = 1 << 17
"""FP32 elements of a block of rows: a block and what becomes of it stay in the processor's cache."""
LEAST_ROWS = 16
"""A matrix product gives each element the same bits in blocks of so many rows as over all rows; not in one alone.
Measured with MKL's kernels for AVX-512; those for older processors differ in the last bit of FP32 here and there."""
WIDE_ROW = 1 << 18
"""Elements above which a row is a block of its own."""
DEPTH = 2
_PROGRESS = "merge.json"


@dataclass(frozen=True)
class TensorRecord:
    """What became of a tensor: |W' - W| / |W| (Frobenius; |W'| where |W| is 0), and whether any byte changed.

    `relative` is None for a tensor that the base does not have in this shape.
    """

    relative: float | None
    changed: bool


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
                _must_keep(base.source.files[file.path], job)
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


def _must_keep(entry: FileEntry, job: StreamJob) -> None:
    if not job.sink.keep(entry):
        raise DataLoss(f"{entry.path} of the base is no longer in the store: upload the base again")


@dataclass(frozen=True)
class _Piece:
    """Bytes to be written, and the buffer to give back afterwards: where they are more than fit, it only counts."""

    data: Tensor
    buffer: Tensor


class _Shard:
    """One file on its way from store to store."""

    def __init__(self, base: WeightFiles, file: OutputFile, job: StreamJob) -> None:
        self._base = base
        self._file = file
        self._job = job
        buffers = (torch.empty(PIECE_BYTES, dtype=torch.uint8) for _ in range(2 * (DEPTH + 2)))
        self._pool = Pool(buffers)
        """Enough for two full lanes and one piece in the hands at each end."""

    def merge_into(self, outcome: MergeOutcome) -> None:
        records: dict[str, TensorRecord] = {}
        path = self._file.path
        with self._base.source.stream(path) as stream, self._job.sink.write(path) as write:

            def consume(piece: _Piece) -> None:
                write(_bytes_of(piece.data))
                self._pool.give(piece.buffer)

            with (
                behind(consume, depth=DEPTH) as put,
                closing(ahead(self._read(stream), depth=DEPTH)) as items,
                self._pool,
            ):
                for item in items:
                    if isinstance(item, _Piece):
                        put(item)
                    else:
                        records[item[0].name] = self._merge(*item, put)
        outcome.tensors |= records
        outcome.files[path] = self._job.sink.entries[path]

    def _merge(self, tensor: OutputTensor, stored: Tensor, put: Callable[[_Piece], None]) -> TensorRecord:
        merging = _Merging(tensor, stored)
        for start, stop in row_pieces(tensor):
            rows = (stop - start, *tensor.shape[1:])
            piece = self._piece(math.prod(rows) * tensor.dtype.itemsize)
            merging.round_into(piece.data.view(tensor.dtype).reshape(rows), start)
            put(piece)
        return merging.record()

    def _read(self, stream: FileStream) -> Iterator[_Piece | tuple[OutputTensor, Tensor]]:
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
            whole = torch.empty(stored.size_bytes, dtype=torch.uint8)
            stream.read_into(_bytes_of(whole))
            if tensor is not None:
                yield tensor, whole.view(stored.dtype).reshape(stored.shape or (1,))
        stream.finish()
        for tensor in self._file.tensors:
            if tensor.name not in here:
                yield tensor, self._from_elsewhere(tensor)

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

    def _copied(self, data: bytes) -> Iterator[_Piece]:
        for start in range(0, len(data), PIECE_BYTES):
            part = data[start : start + PIECE_BYTES]
            piece = self._piece(len(part))
            _bytes_of(piece.data)[:] = part
            yield piece

    def _piece(self, size: int) -> _Piece:
        buffer = self._pool.take()
        return _Piece(buffer[:size] if size <= PIECE_BYTES else torch.empty(size, dtype=torch.uint8), buffer)


class _Merging:
    """One tensor that changes: rounded block of rows by block of rows, and how far it has moved."""

    def __init__(self, tensor: OutputTensor, stored: Tensor) -> None:
        if tensor.change is None:
            raise ValueError(f"{tensor.name} does not change")
        self._tensor = tensor
        base = stored if tensor.decode is None else tensor.decode(stored)
        self.rows = tensor.change.begin(base)
        comparable = tuple(base.shape) == (tensor.shape or (1,)) and base.is_floating_point()
        self._before = base if comparable else None
        before, after = (wide(torch.empty(0, dtype=dtype)).dtype for dtype in (base.dtype, tensor.dtype))
        self._before_block, self._after_block = Scratch(before), Scratch(torch.promote_types(before, after))
        self._moved = self._norm = 0.0
        self._same_bytes = comparable and base.dtype == tensor.dtype and tensor.decode is None

    def round_into(self, rounded: Tensor, first: int) -> None:
        """Merge the rows from `first` on and round them, once, into `rounded`: block by block."""
        for start, stop in row_blocks(tuple(rounded.shape)):
            merged = self.rows(first + start, first + stop)
            block = rounded[start:stop].copy_(merged)
            self._measure(block, merged, None if self._before is None else self._before[first + start : first + stop])

    def _measure(self, rounded: Tensor, merged: Tensor, stored: Tensor | None) -> None:
        if stored is None:
            self._add(sum_of_squares(wide(rounded)), merged)
            return
        before = self._before_block.copy(stored)
        after = self._after_block.copy(rounded)
        self._norm += sum_of_squares(before)
        self._add(sum_of_squares(torch.sub(after, before, out=self._after_block.take(after.shape))), merged)
        self._same_bytes = self._same_bytes and same_bytes(rounded, stored)

    def record(self) -> TensorRecord:
        if self._before is None:
            return TensorRecord(None, changed=True)
        return TensorRecord(math.sqrt(self._moved) / (math.sqrt(self._norm) or 1.0), not self._same_bytes)

    def _add(self, moved: float, merged: Tensor) -> None:
        if not math.isfinite(moved):
            self._refuse(merged)
        self._moved += moved

    def _refuse(self, merged: Tensor) -> None:
        name, dtype = self._tensor.name, str(self._tensor.dtype).removeprefix("torch.")
        largest = float(merged.abs().max())
        if math.isfinite(largest):
            raise InvalidModel(
                f"tensor {name!r} has the merged value {largest:g}, which {dtype} cannot hold: set the stage's "
                "output_dtype to float32 or bfloat16",
                reason="OVERFLOW",
                field=name,
            )
        raise InvalidModel(
            f"tensor {name!r} of the merged model holds NaN or infinite values: an adapter's weights, alpha or weight "
            "are too large, or it is damaged",
            reason="NON_FINITE",
            field=name,
        )


def row_blocks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """[start, stop) of blocks of rows that cover a tensor of this shape: of about BLOCK_ELEMENTS values, of at least
    LEAST_ROWS rows where the tensor has as many, one row where a row is wide.
    """
    return _row_runs(shape, BLOCK_ELEMENTS)


def row_pieces(tensor: OutputTensor) -> Iterator[tuple[int, int]]:
    """The same with several blocks in each: what is written at once, half a piece or more."""
    return _row_runs(tensor.shape, PIECE_BYTES // (2 * tensor.dtype.itemsize))


def _row_runs(shape: tuple[int, ...], elements: int) -> Iterator[tuple[int, int]]:
    rows = shape[0] if shape else 1
    width = max(1, math.prod(shape[1:]))
    step = 1 if width > WIDE_ROW else max(LEAST_ROWS, elements // width)
    start = 0
    while start < rows:
        stop = rows if rows - start < 2 * step else start + step
        yield start, stop
        start = stop


def sum_of_squares(block: Tensor) -> float:
    """In the block's own precision; in FP64 where that overflows. NaN and infinity stay what they are."""
    flat = block.reshape(-1)
    total = float(torch.dot(flat, flat))
    if math.isfinite(total):
        return total
    wider = flat.double()
    return float(torch.dot(wider, wider))


def same_bytes(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))


def _bytes_of(data: Tensor) -> memoryview:
    return data.numpy().data
