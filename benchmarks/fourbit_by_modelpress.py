"""`python -m benchmarks.fourbit_by_modelpress STORE BASE CALIBRATION OUTPUT STAGE THREADS`: quantize and export.

BASE is a digest in the store, CALIBRATION a dataset folder, STAGE a JSON object of `quantize_weights`; the exported
compressed-tensors folder is copied out of the store to OUTPUT.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from benchmarks.processes import clock, say
from compressors import export_compressed_tensors, quantize_weights
from compressors.stages import Calibration, SilentMonitor, StreamJob, WorkPlace
from modelpress.digests import Digest
from modelpress.quantization_recipes import QuantizeWeights
from modelpress.recipes import Export
from service.storage.store import ContentStore
from service.storage.stored_folders import StoredFolder, StoreSink


def main(*given: str) -> None:
    begun = clock()
    root, base, texts, output, stage, threads = given
    arguments = QuantizeWeights.model_validate(json.loads(stage))
    store = ContentStore(root, scratch=Path(root) / "scratch")
    sink, exported = StoreSink(store), StoreSink(store)
    with tempfile.TemporaryDirectory(dir=root) as scratch:
        model = store.manifest(Digest(base))
        tokenizer = Path(root).parent / "base"
        calibration = Calibration(Path(texts), digest="", text_column="text", tokenizer=tokenizer)
        needed = calibration if arguments.needs_calibration else None
        work = WorkPlace(Path(scratch), threads=int(threads), calibration=needed)
        job = StreamJob(base=StoredFolder(model, store), sink=sink, seed=0, work=work)
        quantize_weights.run(arguments, job, SilentMonitor())
    made = StreamJob(base=StoredFolder(sink.finish(), store), sink=exported, seed=0)
    export_compressed_tensors.run(Export(format="compressed-tensors"), made, SilentMonitor())
    store.fetch_folder(exported.finish(), Path(output))
    say(begun)


if __name__ == "__main__":
    main(*sys.argv[1:])
