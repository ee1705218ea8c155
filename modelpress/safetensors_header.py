"""The header of a safetensors file, parsed strictly and in pure Python: names, dtypes, shapes, offsets.

    header = read_header(read, size_bytes=size_bytes, name="model.safetensors")

A file whose header passes lies about nothing: every tensor's bytes are where it says, once, without gap, overlap or
rest. Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header length, JSON, tensors).
What is no safetensors file at all (an HTML error page, a Git LFS pointer, a pickle) is named as what it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from modelpress.errors import InvalidModel
from modelpress.strict_json import JsonError, read_object

MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 100_000
"""Of one file. The largest models split their tensors over many files."""
MAX_DIMENSIONS = 16
MAX_NAME_CHARACTERS = 512

DTYPE_BITS: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}

CURES: Mapping[str, str] = {
    "EMPTY_FILE": "upload it again",
    "TRUNCATED_FILE": "copy it again from where it was written",
    "PICKLE_FILE": "save the state_dict with safetensors.torch.save_file, or the model with save_pretrained",
    "NOT_SAFETENSORS": "",
    "BAD_SAFETENSORS": "write it again with safetensors.torch.save_file",
}
"""What helps, by the error's reason. NOT_SAFETENSORS names the cure with what was found."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_LENGTH_BYTES = 8
_FIELDS = {"dtype", "shape", "data_offsets"}

Read = Callable[[int, int], bytes]
"""read(offset, length) -> those bytes of the file; fewer only at its end."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: [begin, end) in bytes, counted from the start of the file's data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """Tensors in the order of their bytes; `data_start` is the file offset that `begin` and `end` count from."""

    tensors: tuple[TensorEntry, ...]
    data_start: int


def read_header(read: Read, *, size_bytes: int, name: str) -> Header:
    """Parse the header of the file `name`; InvalidModel says what is wrong with it and what helps.

    At most MAX_HEADER_BYTES are read, whatever the file claims.
    """
    prefix = read(0, 512)
    length = int.from_bytes(prefix[:_LENGTH_BYTES], "little")
    if len(prefix) <= _LENGTH_BYTES or prefix[_LENGTH_BYTES : _LENGTH_BYTES + 1] != b"{":
        _refuse_foreign(prefix, name)
    available = size_bytes - _LENGTH_BYTES
    if length > available:
        _fail("TRUNCATED_FILE", name, f"is truncated: a header of {length} bytes is announced, {available} follow")
    if length > MAX_HEADER_BYTES:
        _fail("BAD_SAFETENSORS", name, f"has a header of {length} bytes: at most {MAX_HEADER_BYTES} are read")
    entries = _parse(read(_LENGTH_BYTES, length), name)
    tensors = tuple(sorted((_entry(*item, name) for item in entries.items()), key=lambda t: (t.begin, t.end)))
    _check_layout(tensors, available - length, name)
    return Header(tensors, _LENGTH_BYTES + length)


def foreign_content(prefix: bytes) -> str | None:
    """What a file beginning with `prefix` is, where it is known and no safetensors file, e.g. `a Git LFS pointer`."""
    text = prefix.lstrip().lower()
    found = (what for magic, what in _BINARY_MAGIC if prefix.startswith(magic))
    return next(found, next((what for magic, what in _TEXT_MAGIC if text.startswith(magic)), None))


def is_pickle(prefix: bytes) -> bool:
    """True for the pickle protocols 2 to 5 and for a zip archive, which is how torch.save writes."""
    return prefix.startswith(b"PK\x03\x04") or (
        prefix[:1] == b"\x80" and prefix[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
    )


_TEXT_MAGIC = (
    (b"version https://git-lfs", "a Git LFS pointer: run `git lfs pull`, and upload the file that it stands for"),
    (b"<!doctype", "an HTML page: the download of the file failed"),
    (b"<html", "an HTML page: the download of the file failed"),
    (b"<?xml", "an XML page: the download of the file failed"),
)
_BINARY_MAGIC = (
    (b"GGUF", "a GGUF file: export the model as safetensors"),
    (b"\x89HDF", "an HDF5 file: export the model as safetensors"),
    (b"\x1f\x8b", "a gzip archive: upload the files in it"),
    (b"\x93NUMPY", "a NumPy file: export the model as safetensors"),
)


def _refuse_foreign(prefix: bytes, name: str) -> None:
    if not prefix:
        _fail("EMPTY_FILE", name, "is empty")
    if is_pickle(prefix):
        _fail("PICKLE_FILE", name, "is a pickle (torch.save), which can run code when loaded")
    what = foreign_content(prefix)
    if what:
        _fail("NOT_SAFETENSORS", name, f"is {what}")
    if len(prefix) <= _LENGTH_BYTES:
        _fail("TRUNCATED_FILE", name, f"is truncated: it has {len(prefix)} bytes")
    _fail("NOT_SAFETENSORS", name, "is no safetensors file: save the model with save_pretrained")


def _parse(data: bytes, name: str) -> dict[str, Any]:
    """The header's entries by tensor name. Brackets and commas are counted first, so that parsing stays cheap."""
    if max(data.count(b"{"), data.count(b"[") // 2, data.count(b",") // 16) > MAX_TENSORS + 2:
        _fail("BAD_SAFETENSORS", name, f"has a header with more than {MAX_TENSORS} tensors")
    try:
        entries = read_object(data)
    except JsonError as fault:
        _fail("BAD_SAFETENSORS", name, f"has a bad header: it {fault}")
    entries.pop("__metadata__", None)
    if not entries:
        _fail("BAD_SAFETENSORS", name, "holds no tensors")
    return entries


def _entry(tensor: str, value: Any, name: str) -> TensorEntry:
    if not tensor or len(tensor) > MAX_NAME_CHARACTERS or _CONTROL.search(tensor):
        _fail("BAD_SAFETENSORS", name, f"has a tensor with the unusable name {tensor[:80]!r}")
    shown = f"has a tensor {tensor!r}"
    if not isinstance(value, dict) or set(value) != _FIELDS:
        _fail("BAD_SAFETENSORS", name, f"{shown} without exactly the fields {', '.join(sorted(_FIELDS))}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _fail("BAD_SAFETENSORS", name, f"{shown} of the unknown dtype {str(dtype)[:40]!r}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        _fail("BAD_SAFETENSORS", name, f"{shown} of the impossible shape {str(shape)[:80]}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _fail("BAD_SAFETENSORS", name, f"{shown} at the impossible data_offsets {str(offsets)[:80]}")
    entry = TensorEntry(tensor, dtype, tuple(shape), *offsets)
    if entry.elements * DTYPE_BITS[dtype] != 8 * (entry.end - entry.begin):
        wanted = f"shape {list(shape)} of {dtype} takes {-(-entry.elements * DTYPE_BITS[dtype] // 8)} bytes"
        _fail("BAD_SAFETENSORS", name, f"{shown} that lies: {wanted}, its data_offsets span {entry.end - entry.begin}")
    return entry


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _check_layout(tensors: tuple[TensorEntry, ...], data_bytes: int, name: str) -> None:
    """Tensors follow one another from the first byte to the last: no overlap, no gap, no rest."""
    end = 0
    for before, tensor in zip((None, *tensors), tensors, strict=False):
        if tensor.begin < end:
            _fail("BAD_SAFETENSORS", name, f"has overlapping tensors {before and before.name!r} and {tensor.name!r}")
        if tensor.begin > end:
            _fail("BAD_SAFETENSORS", name, f"has a gap of {tensor.begin - end} bytes before tensor {tensor.name!r}")
        end = tensor.end
    if end > data_bytes:
        _fail(
            "TRUNCATED_FILE", name, f"is truncated: its tensors take {end} bytes, the file holds {data_bytes} of them"
        )
    if end < data_bytes:
        _fail("BAD_SAFETENSORS", name, f"has {data_bytes - end} bytes after its last tensor, which nothing reads")


def _fail(reason: str, name: str, what: str) -> NoReturn:
    """`what` is the rest of a sentence that starts with the file's name."""
    cure = CURES[reason]
    raise InvalidModel(f"{name} {what}" + (f": {cure}" if cure else ""), reason=reason, field=name)
