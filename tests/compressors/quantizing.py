"""Decoders in a content store, and `quantize_weights` run on them: what its tests share."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from compressors import quantize_weights
from compressors.stages import Calibration, Monitor, SilentMonitor, StreamJob, WorkPlace
from modelpress.digests import digest_bytes
from modelpress.manifests import Manifest
from modelpress.quantization_recipes import QuantizeWeights
from modelpress.reports import StageRecord
from service.storage.store import ContentStore
from service.storage.stored_folders import StoredFolder, StoreSink
from tests.compressors.decoders import make_texts, write_tokenizer
from tests.compressors.streams import KeepingMonitor

DATASET = digest_bytes(b"texts")


class Bench:
    """A content store, one base and its calibration texts: 40 of 40 tokens each."""

    def __init__(self, root: Path, model: Path) -> None:
        self.root = root
        self.model = model
        self.store = ContentStore(str(root / "store"), scratch=root / "store-scratch")
        self.base = StoredFolder(self.store.put_folder(model), self.store)
        self.texts = make_texts(root / "texts", rows=40, seed=5)
        # without a config.json: for a Qwen2's transformers takes any tokenizer.json as byte pairs
        self.tokenizer = root / "tokenizer"
        write_tokenizer(self.tokenizer)

    def arguments(self, **fields: object) -> QuantizeWeights:
        """Rounding at w4a16 g32 on 8 windows of 32 tokens, with these fields instead."""
        small = {"algorithm": "rtn", "group_size": 32, "sequence_length": 32, "calibration_samples": 8}
        return QuantizeWeights(**{**small, **fields})

    def run(
        self, *, monitor: Monitor | None = None, sink: StoreSink | None = None, seed: int = 0, **fields: object
    ) -> tuple[StageRecord, Manifest]:
        """With calibration."""
        texts = Calibration(self.texts, str(DATASET), "text", self.tokenizer)
        return self._run(texts, monitor or SilentMonitor(), sink or StoreSink(self.store), seed=seed, **fields)

    def run_uncalibrated(self, **fields: object) -> tuple[StageRecord, Manifest]:
        return self._run(None, SilentMonitor(), StoreSink(self.store), seed=0, **fields)

    def folder(self, manifest: Manifest) -> Path:
        output = self.root / "output" / manifest.digest.hex
        if not output.exists():
            self.store.fetch_folder(manifest, output)
        return output

    def blobs(self) -> set[Path]:
        return {path for path in (self.root / "store").rglob("*") if path.is_file()}

    def _run(
        self, calibration: Calibration | None, monitor: Monitor, sink: StoreSink, *, seed: int, **fields: object
    ) -> tuple[StageRecord, Manifest]:
        scratch = self.root / "scratch"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        work = WorkPlace(scratch, calibration=calibration)
        job = StreamJob(self.base, sink, seed=seed, work=work)
        record = quantize_weights.run(self.arguments(**fields), job, monitor)
        return record, sink.finish()


class Killed(BaseException):
    """The worker is gone."""


class KillingMonitor(KeepingMonitor):
    """Dies right after it has saved the next checkpoint."""

    def save_checkpoint(self, step: int, write: Callable[[Path], None]) -> None:
        super().save_checkpoint(step, write)
        raise Killed
