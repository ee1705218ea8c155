"""An artifact's files as intake sees them: read by ranges from the store, never written to disk, never run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from modelpress.errors import InvalidRequest
from modelpress.manifests import FileEntry, Manifest
from modelpress.safetensors_header import foreign_content, is_pickle
from modelpress.strict_json import JsonError, read_object
from service.storage.store import ContentStore

PREFIX_BYTES = 512
MAX_CONFIG_BYTES = 1 << 20

PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib"})
CODE_SUFFIXES = frozenset({".py", ".pyc", ".so", ".dll", ".dylib", ".exe", ".sh", ".bat"})
WEIGHT_SUFFIXES = frozenset(
    {".onnx", ".h5", ".keras", ".msgpack", ".ot", ".gguf", ".ggml", ".tflite", ".pb", ".npz", ".npy", ".mlmodel"}
)
_ONNX_SIDE_FILE = re.compile(r"\.onnx[._]data(_\d+)?", re.IGNORECASE)


@dataclass(frozen=True)
class Folder:
    """A manifest and the store that holds its blobs."""

    manifest: Manifest
    store: ContentStore

    def read(self, entry: FileEntry, offset: int, length: int) -> bytes:
        """Bytes [offset, offset + length) of a file; fewer at its end."""
        return b"".join(self.chunks(entry, offset, length))

    def chunks(self, entry: FileEntry, offset: int, length: int) -> Iterator[bytes]:
        """The same in pieces of at most 1 MiB."""
        start = min(offset, entry.size_bytes)
        return self.store.read(entry.digest, offset=start, length=min(length, entry.size_bytes - start))

    def with_suffix(self, suffix: str) -> tuple[FileEntry, ...]:
        return tuple(entry for entry in self.manifest.files if PurePosixPath(entry.path).suffix.lower() == suffix)

    def json_object(self, entry: FileEntry, error: type[InvalidRequest], *, limit: int) -> dict[str, Any]:
        """A file that holds one JSON object; `error` names the file and what it holds instead."""
        if entry.size_bytes > limit:
            sentence = f"{entry.path} has {entry.size_bytes} bytes: at most {limit} are read"
            raise error(sentence, reason="BAD_JSON_FILE", field=entry.path)
        data = self.read(entry, 0, limit)
        try:
            return read_object(data)
        except JsonError as fault:
            what = foreign_content(data[:PREFIX_BYTES])
            sentence = f"is {what}" if what else "is empty: upload it again" if not data else str(fault)
            raise error(f"{entry.path} {sentence}", reason="BAD_JSON_FILE", field=entry.path) from None


def refuse_payloads(folder: Folder, error: type[InvalidRequest]) -> None:
    """Refuse pickles, by name and by content, and code: neither is ever run, and neither ships in a signed folder."""
    for entry in folder.manifest.files:
        suffix = PurePosixPath(entry.path).suffix.lower()
        if suffix in CODE_SUFFIXES:
            _refuse(entry, error, "CODE_FILE")
        if suffix in PICKLE_SUFFIXES:
            _refuse(entry, error, "PICKLE_FILE")
        if suffix != ".safetensors" and is_pickle(folder.read(entry, 0, PREFIX_BYTES)):
            _refuse(entry, error, "PICKLE_FILE")


def refuse_other_weights(folder: Folder, error: type[InvalidRequest]) -> None:
    """Refuse weights in formats that no stage reads: left in, they would ship unchanged beside the compressed model."""
    for entry in folder.manifest.files:
        if PurePosixPath(entry.path).suffix.lower() in WEIGHT_SUFFIXES or _ONNX_SIDE_FILE.search(entry.path):
            _refuse(entry, error, "UNSUPPORTED_WEIGHTS")


_SENTENCES: Mapping[str, str] = {
    "PICKLE_FILE": (
        "is a pickle or an archive, which can run code when loaded: save weights as safetensors "
        "(`model.save_pretrained(folder)`, or a state_dict with `safetensors.torch.save_file`), leave others out"
    ),
    "CODE_FILE": "is code, and code from an artifact is never run: leave it out",
    "UNSUPPORTED_WEIGHTS": "holds weights in a format that is not read: upload safetensors only",
}


def _refuse(entry: FileEntry, error: type[InvalidRequest], reason: str) -> None:
    raise error(f"{entry.path} {_SENTENCES[reason]}", reason=reason, field=entry.path)
