"""`python -m benchmarks.fourbit_graph MODEL OUTPUT`: the FP32 graph that ONNX Runtime's own quantizers start from."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.processes import clock, say
from compressors import export_decoder_onnx
from compressors.stages import Job, SilentMonitor
from modelpress.recipes import Export


def main(model: str, output: str) -> None:
    begun = clock()
    export_decoder_onnx.run(Export(format="onnx"), Job(Path(model), Path(output), seed=0), SilentMonitor())
    say(begun)


if __name__ == "__main__":
    main(*sys.argv[1:])
