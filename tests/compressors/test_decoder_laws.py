"""What holds for every stage of a decoder language model. A new one joins with one row in METHODS."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from compressors.folders import companion_files
from compressors.registry import COMPRESSORS, STREAMING
from compressors.stages import Job, SilentMonitor, StreamJob, WorkPlace
from modelpress.manifests import Manifest, scan_folder
from modelpress.quantization_recipes import QuantizeWeights
from modelpress.recipes import Export
from modelpress.reports import StageRecord
from service.storage.store import ContentStore
from service.storage.stored_folders import StoredFolder, StoreSink
from tests.compressors.decoders import make_decoder
from tests.compressors.test_laws import METHODS as CLASSIFIER_METHODS


class Method(NamedTuple):
    """`scheme` is that of the quantized decoder that the stage reads; empty: it reads a float one."""

    arguments: Any
    scheme: str = ""


METHODS: Mapping[str, Method] = {
    "quantize_weights": Method(QuantizeWeights(algorithm="rtn", group_size=32)),
    "export_compressed_tensors": Method(Export(format="compressed-tensors"), scheme="w4a16"),
    "export_gptq": Method(Export(format="gptq"), scheme="w4a16"),
    "export_bitsandbytes": Method(Export(format="bitsandbytes"), scheme="nf4"),
    "export_decoder_onnx": Method(Export(), scheme="w4a16"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A float decoder (under ``), and quantized ones by their scheme."""
    root = tmp_path_factory.mktemp("models")
    found = {"": make_decoder(root / "float")}
    for scheme in ("w4a16", "nf4"):
        scale_dtype = "float16" if scheme == "w4a16" else "stored"
        arguments = QuantizeWeights(algorithm="rtn", scheme=scheme, group_size=32, scale_dtype=scale_dtype)
        stream("quantize_weights", arguments, found[""], root / scheme)
        found[scheme] = root / scheme
    return found


def stream(name: str, arguments: Any, model: Path, output: Path) -> StageRecord:
    work = output.with_name(f"{output.name}-work")
    store = ContentStore(str(work / "store"), scratch=work / "blobs")
    (work / "scratch").mkdir()
    sink = StoreSink(store)
    base = StoredFolder(store.put_folder(model), store)
    job = StreamJob(base, sink, seed=7, work=WorkPlace(work / "scratch"))
    record = STREAMING[name].run(arguments, job, SilentMonitor())
    store.fetch_folder(sink.finish(), output)
    return record


@pytest.fixture
def run(models: Mapping[str, Path], tmp_path: Path) -> Callable[..., tuple[StageRecord, Manifest]]:
    def compress(name: str, output: str = "output") -> tuple[StageRecord, Manifest]:
        method, folder = METHODS[name], tmp_path / output
        model = models[method.scheme]
        if name in COMPRESSORS:
            folder.mkdir()
            job = Job(model, folder, seed=7, evidence=tmp_path / f"{output}-evidence")
            record = COMPRESSORS[name].run(method.arguments, job, SilentMonitor())
        else:
            record = stream(name, method.arguments, model, folder)
        return record, scan_folder(folder)

    return compress


def test_every_registered_compressor_is_under_laws() -> None:
    assert METHODS.keys() | CLASSIFIER_METHODS.keys() == COMPRESSORS.keys() | STREAMING.keys()


@pytest.mark.parametrize("name", METHODS)
def test_what_is_no_weight_keeps_its_bytes_and_the_inputs_are_left_alone(name, run, models) -> None:
    model = models[METHODS[name].scheme]
    before = scan_folder(model)
    _, output = run(name)
    assert scan_folder(model) == before
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json"} <= set(companion_files(model))
    assert all(output.entry(path) == before.entry(path) for path in companion_files(model))


@pytest.mark.parametrize("name", METHODS)
def test_equal_inputs_give_equal_bytes(name, run) -> None:
    assert run(name)[1] == run(name, "again")[1]


@pytest.mark.parametrize("name", METHODS)
def test_the_record_is_complete_and_survives_json(name, run) -> None:
    record, _ = run(name)
    assert record.version == {**COMPRESSORS, **STREAMING}[name].version
    assert record.method == METHODS[name].arguments.method
    assert record.arguments == METHODS[name].arguments.model_dump(mode="json")
    assert record.touched
    assert StageRecord.model_validate(json.loads(record.model_dump_json())) == record
