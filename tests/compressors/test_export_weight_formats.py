"""Exports of quantized decoders: the same codes in one folder, everything else kept, loaded again in a new process."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from compressors import export_bitsandbytes, export_compressed_tensors, export_gptq, pack_quantized
from compressors.integer_grid import QuantizedWeight
from compressors.stages import SilentMonitor, StreamJob
from modelpress.errors import DataLoss, InvalidModel
from modelpress.recipes import Export
from modelpress.reports import StageRecord
from service.storage.store import ContentStore
from service.storage.stored_folders import StoredFolder, StoreSink
from tests.compressors.gptq_reading import PARTS, read_gptq_weight
from tests.compressors.quantized_decoders import QuantizedDecoder, arguments_of, quantize_decoder
from tests.compressors.stored_models import same, weights_of

FLOAT_LAYER = "model.layers.1.mlp.down_proj"
INTEGERS = {
    "w4a16": arguments_of(group_size=32),
    "w4a16-asym": arguments_of(group_size=32, symmetric=False),
    "w8a16": arguments_of(scheme="w8a16"),
    "w8a8": arguments_of(scheme="w8a8"),
}
IDS = torch.tensor([[5, 9, 30, 7, 101, 44], [61, 4, 4, 90, 12, 33]])
LOADING = """
import sys, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
torch.set_num_threads(1)
for folder in sys.argv[1:]:
    how = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if "asym" in folder else {}
    model = AutoModelForCausalLM.from_pretrained(folder + "/exported", **how)
    logits = model(torch.tensor(IDS)).logits.detach()
    linears = {name: m.weight.detach() for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    del linears["lm_head"]
    save_file({"logits": logits, **linears}, folder + "/loaded.safetensors")
"""
"""transformers alone; asymmetric weights as the export's warning says."""


class Exported(NamedTuple):
    decoder: QuantizedDecoder
    folder: Path
    record: StageRecord


def export(decoder: QuantizedDecoder, root: Path, *, module: ModuleType, format_name: str) -> Exported:
    store = ContentStore(str(root / "store"), scratch=root / "scratch")
    base, sink = StoredFolder(store.put_folder(decoder.folder), store), StoreSink(store)
    record = module.run(Export(format=format_name), StreamJob(base, sink, seed=0), SilentMonitor())
    store.fetch_folder(sink.finish(), root / "exported")
    return Exported(decoder, root / "exported", record)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    """Every integer scheme as compressed-tensors; one linear layer and the head stay float."""
    made = {}
    for name, arguments in INTEGERS.items():
        root = tmp_path_factory.mktemp(name)
        decoder = quantize_decoder(root / "quantized", arguments, ignored=(FLOAT_LAYER,), seed=3, tie=name != "w8a16")
        made[name] = export(decoder, root, module=export_compressed_tensors, format_name="compressed-tensors")
    return made


@pytest.fixture(scope="module")
def loaded(exported: dict[str, Exported]) -> dict[str, dict[str, Tensor]]:
    """Linear weights and logits of each folder as transformers loads it, in a process that knows nothing of it."""
    folders = {name: made.folder.parent for name, made in exported.items()}
    command = [sys.executable, "-c", LOADING.replace("IDS", str(IDS.tolist())), *map(str, folders.values())]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return {name: load_file(folder / "loaded.safetensors") for name, folder in folders.items()}


@pytest.mark.parametrize("name", INTEGERS)
def test_an_export_is_one_file_with_the_stages_tensors(exported: dict[str, Exported], name: str) -> None:
    decoder, folder, record = exported[name]

    assert [path.name for path in folder.glob("*.safetensors*")] == ["model.safetensors"]
    assert same(weights_of(folder), weights_of(decoder.folder))
    assert sorted(record.touched) == sorted(decoder.weights)
    assert bool(record.warnings) == name.endswith("asym")
    assert record.details["written_bytes"] == (folder / "model.safetensors").stat().st_size


@pytest.mark.parametrize("name", INTEGERS)
def test_every_other_file_is_kept_byte_for_byte(exported: dict[str, Exported], name: str) -> None:
    """Case 46."""
    decoder, folder, _ = exported[name]
    kept = {path.name for path in decoder.folder.iterdir() if ".safetensors" not in path.name}
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json", "config.json", "README.md"} <= kept
    assert kept == {path.name for path in folder.iterdir()} - {"model.safetensors"}
    assert all((folder / name).read_bytes() == (decoder.folder / name).read_bytes() for name in kept)


@pytest.mark.parametrize("name", INTEGERS)
def test_a_new_process_loads_exactly_the_dequantized_weights(exported, loaded, name: str) -> None:
    values = exported[name].decoder.dequantized

    linears = loaded[name].keys() - {"logits"}

    assert linears == {tensor.removesuffix(".weight") for tensor in values if tensor.endswith("_proj.weight")}
    assert all(torch.equal(loaded[name][linear], values[f"{linear}.weight"]) for linear in linears)


def fake_quantized(made: Exported) -> AutoModelForCausalLM:
    """The base with the values that its quantized weights stand for."""
    model = AutoModelForCausalLM.from_pretrained(made.decoder.folder.with_name("quantized-base"))
    model.load_state_dict(made.decoder.dequantized, strict=False)
    return model


@pytest.mark.parametrize("name", [name for name in INTEGERS if name != "w8a8"])
def test_a_new_process_computes_the_logits_of_the_fake_quantized_model(exported, loaded, name: str) -> None:
    logits = fake_quantized(exported[name])(IDS).logits
    torch.testing.assert_close(loaded[name]["logits"], logits, rtol=0, atol=2e-5)


def test_w8a8_quantizes_the_inputs_of_its_layers_per_token_while_it_runs(exported, loaded) -> None:
    """Each token's inputs lie on a symmetric grid of 8 bits over its own range, scale 2 max|x| / 255."""
    model = fake_quantized(exported["w8a8"])

    def on_the_grid(module: torch.nn.Module, inputs: tuple[Tensor]) -> Tensor:
        scales_BT1 = inputs[0].abs().amax(dim=-1, keepdim=True) / 127.5
        return (inputs[0] / scales_BT1).clamp(-128, 127).round() * scales_BT1

    weight_only = model(IDS).logits
    for name in exported["w8a8"].decoder.weights:
        model.get_submodule(name).register_forward_pre_hook(on_the_grid)
    logits = model(IDS).logits
    torch.testing.assert_close(loaded["w8a8"]["logits"], logits, rtol=0, atol=2e-5)
    assert not torch.allclose(logits, weight_only, atol=1e-3)


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("scheme", ["w4a16", "w8a16"])
def test_gptq_holds_the_same_codes_and_scales(tmp_path: Path, scheme: str, symmetric: bool) -> None:
    arguments = arguments_of(scheme=scheme, symmetric=symmetric, scale_dtype="float16")
    decoder = quantize_decoder(tmp_path / "quantized", arguments, dtype="bfloat16", ignored=(FLOAT_LAYER,))

    _, folder, record = export(decoder, tmp_path, module=export_gptq, format_name="gptq")

    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors = weights_of(folder)
    for module, weight in decoder.weights.items():
        read = read_gptq_weight(module, tensors, quantization=config)
        assert torch.equal(read.dequantized(), weight.dequantized())
    others = {name for name in decoder.plain if name.removesuffix(".weight") not in decoder.weights}
    parts = {f"{module}.{part}" for module in decoder.weights for part in PARTS}
    assert tensors.keys() == others | parts
    assert same({n: tensors[n] for n in others}, {n: decoder.plain[n] for n in others})
    assert json.loads((folder / "quantize_config.json").read_text()) == config
    assert record.details["layout"] == ("gptq" if symmetric else "gptq_v2")
    assert rf"-:^{FLOAT_LAYER}$".replace(".", r"\.") in config["dynamic"]


def test_each_layer_is_repacked_for_gptq_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = quantize_decoder(tmp_path / "quantized", arguments_of(scale_dtype="float16"), dtype="bfloat16")
    read, unpacked = pack_quantized.read_weight, []

    def counted(module: str, *given: Any, **named: Any) -> QuantizedWeight:
        unpacked.append(module)
        return read(module, *given, **named)

    monkeypatch.setattr(pack_quantized, "read_weight", counted)
    export(decoder, tmp_path, module=export_gptq, format_name="gptq")
    assert sorted(unpacked) == sorted(decoder.weights)


@pytest.mark.parametrize("scheme", ["nf4", "fp4"])
def test_bitsandbytes_holds_the_stages_tensors_and_reads_again(tmp_path: Path, scheme: str) -> None:
    decoder = quantize_decoder(tmp_path / "quantized", arguments_of(scheme=scheme, group_size=64), dtype="bfloat16")

    _, folder, record = export(decoder, tmp_path, module=export_bitsandbytes, format_name="bitsandbytes")

    assert same(weights_of(folder), weights_of(decoder.folder))
    assert (folder / "config.json").read_bytes() == (decoder.folder / "config.json").read_bytes()
    assert sorted(record.touched) == sorted(decoder.weights)
    assert record.details["layout"] == scheme


@pytest.mark.parametrize("scheme", ["nf4", "fp4"])
def test_bitsandbytes_itself_loads_the_values_and_changes_no_file(tmp_path: Path, scheme: str) -> None:
    """Case 54: its first forward repacks weights in memory; what is stored stays what it is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = pytest.importorskip("bitsandbytes", reason="bitsandbytes is the reference of this test")
    decoder = quantize_decoder(tmp_path / "quantized", arguments_of(scheme=scheme, group_size=32))
    _, folder, _ = export(decoder, tmp_path, module=export_bitsandbytes, format_name="bitsandbytes")
    stored = {path.name: path.read_bytes() for path in folder.iterdir()}

    model = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu")

    for module, weight in decoder.weights.items():
        found = model.get_submodule(module).weight
        assert torch.equal(library.functional.dequantize_4bit(found.data, found.quant_state), weight.dequantized())
    model(IDS)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == stored


@pytest.mark.parametrize("module", [export_compressed_tensors, export_gptq, export_bitsandbytes])
def test_a_base_that_is_not_quantized_is_refused(tmp_path: Path, module: ModuleType) -> None:
    decoder = quantize_decoder(tmp_path / "quantized", arguments_of())
    plain = QuantizedDecoder(decoder.folder.with_name("quantized-base"), {}, {})
    with pytest.raises(InvalidModel, match="quantization_config"):
        export(plain, tmp_path, module=module, format_name="gptq")


def test_gptq_refuses_quantized_activations_and_other_scales(tmp_path: Path) -> None:
    for scheme, said in {"w8a8": "compressed-tensors", "w4a16": "float16"}.items():
        decoder = quantize_decoder(tmp_path / scheme, arguments_of(scheme=scheme))
        with pytest.raises(InvalidModel, match=said):
            export(decoder, tmp_path / f"{scheme}-out", module=export_gptq, format_name="gptq")


def test_a_stored_weight_that_changed_is_data_loss(tmp_path: Path) -> None:
    decoder = quantize_decoder(tmp_path / "quantized", arguments_of())
    store = ContentStore(str(tmp_path / "store"), scratch=tmp_path / "scratch")
    manifest = store.put_folder(decoder.folder)
    entry = next(entry for entry in manifest.files if entry.path.startswith("model-00002"))
    blob = next(path for path in (tmp_path / "store").rglob("*") if path.name == entry.digest.hex)
    blob.chmod(0o600)
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)

    with pytest.raises(DataLoss):
        job = StreamJob(StoredFolder(manifest, store), StoreSink(store), seed=0)
        export_compressed_tensors.run(Export(format="compressed-tensors"), job, SilentMonitor())
