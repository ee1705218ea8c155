"""One model and its adapter, and the programs that are measured on them, each in a process of its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.merge_exact import Difference, Weights, compare
from benchmarks.merge_models import Llama, link_folder, write_adapter, write_base
from benchmarks.processes import UNLIMITED, Measured, measure
from modelpress.digests import Digest
from modelpress.manifests import Manifest
from service.storage.store import ContentStore

THREADS = 2
"""As many as the service gives a worker."""


@dataclass(frozen=True)
class Case:
    """Base and adapter in a store, and the same files as the folders `base` and `adapter`.

    Each program writes the folder that has its name, which must not be there.
    """

    llama: Llama
    folder: Path
    store: ContentStore
    base: Manifest
    adapter: Manifest

    @staticmethod
    def make(llama: Llama, folder: Path) -> Case:
        store = ContentStore(str(folder / "store"), scratch=folder / "scratch")
        case = Case(llama, folder, store, write_base(llama, store), write_adapter(llama, store))
        link_folder(case.base, folder / "store", folder / "base")
        link_folder(case.adapter, folder / "store", folder / "adapter")
        return case

    def peft(self) -> Measured:
        os.sync()
        folders = (self.folder / name for name in ("base", "adapter", "peft"))
        return measure("benchmarks.merge_by_peft", *folders, str(THREADS))

    def modelpress(self, *, data_limit_bytes: int = UNLIMITED) -> Measured:
        """The store keeps nothing of the merged model but the folder's links to it."""
        os.sync()
        root, inputs = self.folder / "store", (str(self.base.digest), str(self.adapter.digest))
        program = "benchmarks.merge_by_modelpress"
        measured = measure(program, root, *inputs, str(THREADS), data_limit_bytes=data_limit_bytes)
        merged = self.store.manifest(Digest(measured.said["digest"]))
        link_folder(merged, root, self.folder / "modelpress")
        for digest in {entry.digest for entry in merged.files} - {entry.digest for entry in self.base.files}:
            self.store.delete(digest)
        return measured

    def copy(self) -> Measured:
        os.sync()
        return measure("benchmarks.merge_floor", self.folder / "base", self.folder / "copy")

    def remove(self, program: str) -> None:
        """Delete what it wrote, so that the next one finds the same disk."""
        shutil.rmtree(self.folder / program)

    def forget(self) -> None:
        """Drop base and adapter from the page cache: they are read from the disk again."""
        os.sync()
        for name in ("base", "adapter"):
            for file in (self.folder / name).iterdir():
                with file.open("rb") as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def difference(self, program: str, tensors: Iterable[str]) -> Difference:
        """What the program wrote, from the definition, over these tensors."""
        base, adapter, merged = (Weights(self.folder / name) for name in ("base", "adapter", program))
        return compare(base, adapter, merged, tensors)
