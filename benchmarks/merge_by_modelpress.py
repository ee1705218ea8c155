"""`python -m benchmarks.merge_by_modelpress STORE BASE ADAPTER THREADS`: the stage `merge_lora` alone.

Base and adapter are digests in the store, where the merged folder is written to; its digest is said.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from benchmarks.processes import clock, say
from compressors.merge_lora import run
from compressors.stages import NamedSource, SilentMonitor, StreamJob
from modelpress.digests import Digest
from modelpress.merge_recipes import MergeLora
from service.storage.store import ContentStore
from service.storage.stored_folders import StoredFolder, StoreSink


def main(root: str, base: str, adapter: str, threads: str) -> None:
    begun = clock()
    torch.set_num_threads(int(threads))
    store = ContentStore(root, scratch=Path(root) / "scratch")
    model, lora = (StoredFolder(store.manifest(Digest(digest)), store) for digest in (base, adapter))
    sink = StoreSink(store)
    job = StreamJob(base=model, sink=sink, seed=0, merged=(NamedSource("lora", lora),))
    run(MergeLora(), job, SilentMonitor())
    say(begun, digest=str(sink.finish().digest))


if __name__ == "__main__":
    main(*sys.argv[1:])
