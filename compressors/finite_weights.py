"""A stored model read once from its first byte to its last: verified, and every value of it finite."""

from __future__ import annotations

import torch

from compressors.weight_files import PIECE_BYTES, StoredTensor, WeightFile, WeightFiles
from modelpress.errors import InvalidModel
from modelpress.stored_folders import FileStream


def verify_finite(files: WeightFiles) -> None:
    """DataLoss where a file no longer has its digest, InvalidModel naming the first tensor with NaN or infinity."""
    for file in files.files:
        with files.source.stream(file.path) as stream:
            found = _first_non_finite(file, stream)
            stream.finish()
        if found is not None:
            raise InvalidModel(
                f"tensor {found.name!r} of the model holds NaN or infinite values: save the model again, from "
                "training that did not diverge",
                reason="NON_FINITE",
                field=found.name,
            )


def _first_non_finite(file: WeightFile, stream: FileStream) -> StoredTensor | None:
    """Reads the whole file."""
    stream.read_into(memoryview(bytearray(file.data_start)))
    found = [tensor for tensor in file.tensors if not _is_finite(tensor, stream)]
    return found[0] if found else None


def _is_finite(tensor: StoredTensor, stream: FileStream) -> bool:
    """One pass over each piece: minimum and maximum of values with NaN are NaN."""
    finite = True
    for start in range(0, tensor.size_bytes, PIECE_BYTES):
        piece = torch.empty(min(PIECE_BYTES, tensor.size_bytes - start), dtype=torch.uint8)
        stream.read_into(piece.numpy().data)
        values = piece.view(tensor.dtype)
        if values.is_floating_point():
            bounds = torch.aminmax(values.float() if values.itemsize == 1 else values)
            finite = finite and all(bool(bound.isfinite()) for bound in bounds)
    return finite
