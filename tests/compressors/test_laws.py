"""What holds for every compressor of classifiers, and for merges. A new method joins with one row in METHODS.

The stages of decoders have theirs in `test_decoder_laws`, which also counts that none is without.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from compressors.folders import companion_files, load_model
from compressors.registry import COMPRESSORS, STREAMING
from compressors.stages import Data, Job, NamedSource, SilentMonitor, StreamJob
from modelpress.manifests import Manifest, scan_folder
from modelpress.merge_recipes import MergeLora, MergeModels
from modelpress.recipes import Export, Prune, Quantize, Recover
from modelpress.reports import StageRecord
from service.storage.store import ContentStore
from service.storage.stored_folders import StoredFolder, StoreSink


class Method(NamedTuple):
    """`needs` names what stands in the job beside the model: `adapter`, `model`, `data`, `teacher`."""

    arguments: Any
    needs: tuple[str, ...]
    writes_safetensors: bool = True


METHODS: Mapping[str, Method] = {
    "merge_lora": Method(MergeLora(), needs=("adapter",)),
    "merge_models": Method(MergeModels(), needs=("model",)),
    "prune": Method(Prune(ratio=0.5), needs=("data",)),
    "recover": Method(
        Recover(steps=12, batch_size=16, checkpoint_every=4, learning_rate=2e-3), needs=("data", "teacher")
    ),
    # It touches modules whose codes are not what model.safetensors holds, so the law on named tensors is not its own.
    "quantize": Method(
        Quantize(steps=4, batch_size=16, checkpoint_every=2), needs=("data", "teacher"), writes_safetensors=False
    ),
    "export": Method(Export(), needs=("data",), writes_safetensors=False),
}
SAFETENSORS = [name for name, method in METHODS.items() if method.writes_safetensors]


@pytest.fixture(scope="module")
def noisy_bert(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bert` after damage: what there is to recover from."""
    folder = Path(shutil.copytree(bert, tmp_path_factory.mktemp("models") / "noisy"))
    model = load_model(bert)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "dense.weight" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def make_job(bert: Path, noisy_bert: Path, data: Data, tmp_path: Path) -> Callable[[str], Job]:
    def make(name: str) -> Job:
        needs = METHODS[name].needs
        return Job(
            model=noisy_bert,
            output=tmp_path / "output",
            seed=7,
            data=data if "data" in needs else None,
            teacher=bert if "teacher" in needs else None,
            evidence=tmp_path / "evidence",
        )

    return make


@pytest.fixture
def compress(bert: Path, make_adapter, tmp_path: Path) -> Callable[[str, Job], tuple[StageRecord, Manifest]]:
    """Run a method on a job's folders; a streaming one in a content store that holds them."""
    others = {"adapter": make_adapter, "model": lambda: bert}

    def stream(name: str, job: Job) -> StageRecord:
        store = ContentStore(str(tmp_path / "store"), scratch=tmp_path / "scratch")
        merged = [NamedSource("one", stored(others[need](), store), 0.5) for need in METHODS[name].needs]
        sink = StoreSink(store)
        stream_job = StreamJob(base=stored(job.model, store), sink=sink, seed=job.seed, merged=tuple(merged))
        record = STREAMING[name].run(METHODS[name].arguments, stream_job, SilentMonitor())
        store.fetch_folder(sink.finish(), job.output)
        return record

    def run(name: str, job: Job) -> tuple[StageRecord, Manifest]:
        copying = COMPRESSORS.get(name)
        record = copying.run(METHODS[name].arguments, job, SilentMonitor()) if copying else stream(name, job)
        return record, scan_folder(job.output)

    return run


def stored(folder: Path, store: ContentStore) -> StoredFolder:
    return StoredFolder(store.put_folder(folder), store)


@pytest.mark.parametrize("name", METHODS)
def test_companion_files_keep_their_bytes(name: str, make_job, compress) -> None:
    job = make_job(name)
    _, output = compress(name, job)
    source = scan_folder(job.model)

    assert companion_files(job.model)
    assert all(output.entry(path) == source.entry(path) for path in companion_files(job.model))


@pytest.mark.parametrize("name", METHODS)
def test_the_inputs_are_left_alone(name: str, make_job, compress) -> None:
    job = make_job(name)
    folders = [job.model, *([job.teacher] if job.teacher else [])]
    before = [scan_folder(folder) for folder in folders]
    compress(name, job)

    assert [scan_folder(folder) for folder in folders] == before


@pytest.mark.parametrize("name", METHODS)
def test_equal_inputs_give_equal_bytes_and_equal_records(name: str, make_job, compress, tmp_path: Path) -> None:
    job = make_job(name)
    first = compress(name, job)
    torch.manual_seed(12345)
    again = compress(name, replace(job, output=tmp_path / "again", evidence=tmp_path / "evidence-again"))

    assert first == again


@pytest.mark.parametrize("name", METHODS)
def test_the_record_is_complete_and_survives_json(name: str, make_job, compress) -> None:
    record, _ = compress(name, make_job(name))

    assert record.method == name and record.version == {**COMPRESSORS, **STREAMING}[name].version
    assert record.arguments == METHODS[name].arguments.model_dump(mode="json")
    assert record.touched
    assert StageRecord.model_validate(json.loads(record.model_dump_json())) == record


@pytest.mark.parametrize("name", SAFETENSORS)
def test_exactly_the_tensors_that_are_named_change(name: str, make_job, compress) -> None:
    job = make_job(name)
    record, _ = compress(name, job)
    before, after = (load_file(folder / "model.safetensors") for folder in (job.model, job.output))

    changed = {n for n in before if before[n].shape != after[n].shape or not torch.equal(before[n], after[n])}
    assert before.keys() == after.keys()
    assert changed == set(record.touched)


@pytest.mark.parametrize("name", SAFETENSORS)
def test_the_output_loads_with_every_tensor_as_stored(name: str, make_job, compress) -> None:
    job = make_job(name)
    compress(name, job)

    stored, loaded = load_file(job.output / "model.safetensors"), load_model(job.output).state_dict()
    assert all(torch.equal(stored[tensor], loaded[tensor]) for tensor in loaded)


@pytest.mark.gpu
@pytest.mark.parametrize("name", METHODS)
def test_on_a_gpu_it_touches_what_it_touches_on_the_cpu(name: str, make_job, compress, tmp_path: Path) -> None:
    on_cpu, _ = compress(name, make_job(name))
    on_gpu, output = compress(name, replace(make_job(name), device="cuda", output=tmp_path / "on-gpu"))

    assert on_gpu.touched == on_cpu.touched
    assert output.entry("config.json")
