"""What `quantize_weights` made and what each export makes of it are one model to the evaluators' own readers."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from compressors import export_bitsandbytes, export_compressed_tensors, export_gptq
from compressors.stages import SilentMonitor, StreamJob
from evaluators.language_models import open_language_model
from evaluators.runtimes import Resources
from modelpress.recipes import Export
from service.storage.stored_folders import StoredFolder, StoreSink
from tests.compressors.decoders import make_decoder
from tests.compressors.quantizing import Bench

EXPORTS: dict[str, ModuleType] = {
    "compressed-tensors": export_compressed_tensors,
    "gptq": export_gptq,
    "bitsandbytes": export_bitsandbytes,
}
IDS_BT = torch.tensor([[5, 9, 30, 7, 101, 44]])


@pytest.mark.parametrize(
    ("format_name", "fields"),
    [
        ("compressed-tensors", {"symmetric": False}),
        ("compressed-tensors", {"scheme": "w8a8", "group_size": None}),
        ("gptq", {"scale_dtype": "float16"}),
        ("gptq", {"scale_dtype": "float16", "symmetric": False}),
        ("gptq", {"scale_dtype": "float16", "scheme": "w8a16", "group_size": None}),
        ("bitsandbytes", {"scheme": "nf4"}),
        ("bitsandbytes", {"scheme": "fp4"}),
    ],
    ids=str,
)
def test_an_export_computes_what_its_stage_computes(
    tmp_path: Path, format_name: str, fields: dict[str, object]
) -> None:
    bench = Bench(tmp_path, make_decoder(tmp_path / "base", model_type="qwen2", seed=4))
    stage, manifest = bench.run_uncalibrated(ignore=("lm_head", "model.layers.0.mlp.down_proj"), **fields)
    sink = StoreSink(bench.store)

    job = StreamJob(StoredFolder(manifest, bench.store), sink, seed=0)
    record = EXPORTS[format_name].run(Export(format=format_name), job, SilentMonitor())

    folders = bench.folder(manifest), bench.folder(sink.finish())
    before, after = (open_language_model(folder, Resources()).logits(IDS_BT, IDS_BT.bool()) for folder in folders)
    assert torch.equal(after, before)
    quantized = {layer.name for layer in stage.layers if layer.num_bits < 16}
    assert set(record.touched) == quantized
    assert len(quantized) == 13
