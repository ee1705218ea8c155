"""What `quantize_weights` has finished: the layers' files and records, kept in its checkpoint after every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from modelpress.digests import Digest
from modelpress.documents import Document
from modelpress.manifests import FileEntry
from modelpress.quantization_reports import QuantizedLayer

_FILE = "layers.json"


class FinishedLayer(Document):
    """One decoder layer: its stored file, the records of its linear layers, and the algorithm's figures."""

    path: str
    size_bytes: int
    digest: str
    records: tuple[QuantizedLayer, ...]
    details: dict[str, float]

    @staticmethod
    def of(entry: FileEntry, records: tuple[QuantizedLayer, ...], details: Mapping[str, float]) -> FinishedLayer:
        return FinishedLayer(
            path=entry.path,
            size_bytes=entry.size_bytes,
            digest=str(entry.digest),
            records=records,
            details=dict(details),
        )

    @property
    def entry(self) -> FileEntry:
        return FileEntry(self.path, self.size_bytes, Digest(self.digest))

    @property
    def quantized(self) -> tuple[str, ...]:
        """Linear layers whose weights are codes, by their full names."""
        return tuple(record.name for record in self.records if record.algorithm != "none")


class _Saved(Document):
    layers: dict[int, FinishedLayer]


@dataclass
class QuantizationProgress:
    """Finished decoder layers by their numbers."""

    layers: dict[int, FinishedLayer] = field(default_factory=dict)

    @staticmethod
    def resumed(folder: Path | None) -> QuantizationProgress:
        """What an earlier attempt had finished; nothing where there was none."""
        if folder is None:
            return QuantizationProgress()
        return QuantizationProgress(dict(_Saved.model_validate_json((folder / _FILE).read_text()).layers))

    def save(self, folder: Path) -> None:
        (folder / _FILE).write_text(_Saved(layers=self.layers).model_dump_json())

    @property
    def records(self) -> tuple[QuantizedLayer, ...]:
        """In the model's order."""
        return tuple(record for _, layer in sorted(self.layers.items()) for record in layer.records)

    @property
    def fallbacks(self) -> dict[str, str]:
        """Linear layers that were not quantized as the recipe says, and why."""
        return {record.name: record.fallback for record in self.records if record.fallback}
