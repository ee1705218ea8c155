"""A decoder's ONNX export computes what the model computes in torch, and keeps everything else of its folder."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from safetensors.numpy import load_file, save_file

from compressors.decoder_families import DECODERS
from compressors.decoder_graph import ATTENTION
from compressors.folders import WEIGHTS, companion_files
from compressors.pack_quantized import read_weight
from evaluators.onnx_language import OnnxLanguageModel
from evaluators.runtimes import Resources
from modelpress.errors import InvalidModel
from tests.compressors.conftest import edit_json
from tests.compressors.decoders import make_decoder
from tests.compressors.exported_decoders import (
    FAMILIES,
    Exported,
    base_of,
    export,
    exported_family,
    fake_quantized,
    float_model,
    scratch,
)
from tests.compressors.quantized_decoders import QuantizedDecoder, arguments_of, quantize_decoder
from tests.compressors.quantizing import Bench
from tests.compressors.stored_models import weights_of

PROMPTS = ([5], [17, 4, 99], [8, 8, 31, 120, 64, 7, 7, 90, 12, 55, 3])
KEPT = "model.layers.0.self_attn.k_proj"
QUICK = "w4 asym 64"
SCHEMES = {
    QUICK: arguments_of(symmetric=False, group_size=64, scale_dtype="bfloat16"),
    "w4 sym 32": arguments_of(group_size=32),
    "w4 sym 128": arguments_of(group_size=128, scale_dtype="float16"),
    "w8 asym 32": arguments_of(scheme="w8a16", symmetric=False, group_size=32),
    "w8 sym row": arguments_of(scheme="w8a16", scale_dtype="bfloat16"),
}
ALL_SCHEMES = [scheme if scheme == QUICK else pytest.param(scheme, marks=pytest.mark.slow) for scheme in SCHEMES]


@cache
def quantized_export(scheme: str) -> tuple[QuantizedDecoder, Exported]:
    """One layer, wide enough for the largest group, with biases; one linear layer of it stays float."""
    root = scratch()
    decoder = quantize_decoder(
        root / "model",
        SCHEMES[scheme],
        ignored=(KEPT,),
        model_type="qwen2",
        num_hidden_layers=1,
        hidden_size=128,
        num_attention_heads=8,
    )
    return decoder, export(decoder.folder, root)


def logits(folder: Path, ids_BT: torch.Tensor) -> torch.Tensor:
    return OnnxLanguageModel.open(folder, Resources()).logits(ids_BT, torch.ones_like(ids_BT))


def some_ids() -> torch.Tensor:
    return torch.randint(128, (3, 13), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_greedy_tokens_are_those_of_torch(model_type: str) -> None:
    exported = exported_family(model_type)
    reference, found = float_model(exported.source), OnnxLanguageModel.open(exported.folder, Resources())
    for prompt in PROMPTS:
        expected = reference.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=24, do_sample=False
        )
        assert found.greedy(prompt, max_new_tokens=24, stop=frozenset({2})) == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_logits_are_those_of_torch(model_type: str) -> None:
    exported, ids_BT = exported_family(model_type), some_ids()
    with torch.inference_mode():
        expected = float_model(exported.source)(ids_BT).logits
    torch.testing.assert_close(logits(exported.folder, ids_BT), expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("scheme", ALL_SCHEMES)
def test_a_quantized_export_computes_what_was_chosen(scheme: str) -> None:
    decoder, exported = quantized_export(scheme)
    with torch.inference_mode():
        expected = fake_quantized(decoder)(some_ids()).logits
        unquantized = float_model(base_of(decoder))(some_ids()).logits
    found = logits(exported.folder, some_ids())
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    assert (found - unquantized).abs().max() > 1e-2


@pytest.mark.parametrize("scheme", ALL_SCHEMES)
def test_every_quantized_layer_is_one_operator_without_a_float_weight(scheme: str) -> None:
    decoder, exported = quantized_export(scheme)
    graph = onnx.load(exported.folder / "model.onnx").graph
    products = [node for node in graph.node if node.op_type == "MatMulNBits"]
    assert len(products) == len(decoder.weights) == 6
    assert exported.record.details["quantized_operators"] == {"MatMulNBits": 6}
    assert {attribute.name for node in products for attribute in node.attribute} == {"K", "N", "bits", "block_size"}
    floats = [tensor for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT]
    matrices = [list(tensor.dims) for tensor in floats if len(tensor.dims) == 2 and min(tensor.dims) > 8]
    assert sorted(matrices) == [[128, 32], [128, 128]]
    assert exported.record.kept_float == (KEPT, "lm_head")


@pytest.mark.slow
def test_what_quantize_weights_wrote_is_exported_as_it_is(tmp_path: Path) -> None:
    bench = Bench(tmp_path, make_decoder(tmp_path / "base"))
    _, manifest = bench.run(algorithm="gptq", symmetric=False)
    folder = bench.folder(manifest)
    exported, tensors = export(folder, tmp_path), weights_of(folder)
    quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
    modules = [name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")]
    reference = float_model(tmp_path / "base")
    for module in modules:
        weight = read_weight(module, tensors.__getitem__, quantization=quantization)
        reference.get_submodule(module).weight.data = weight.dequantized()
    with torch.inference_mode():
        expected = reference(some_ids()).logits
    assert len(modules) == 14
    torch.testing.assert_close(logits(exported.folder, some_ids()), expected, rtol=0, atol=5e-5)


def test_weights_are_named_as_in_torch() -> None:
    graph = onnx.load(quantized_export(QUICK)[1].folder / "model.onnx", load_external_data=False).graph
    module = "model.layers.0.mlp.up_proj"
    names = {tensor.name for tensor in graph.initializer}
    assert {f"{module}.codes", f"{module}.scales", f"{module}.zeros", "lm_head.weight"} <= names


def test_every_family_has_its_attention() -> None:
    assert ATTENTION.keys() == DECODERS.keys()


def test_a_tied_head_is_stored_once() -> None:
    tied, own = exported_family("llama"), exported_family("qwen3")
    sizes = {name: shapes_of(exported.folder) for name, exported in (("tied", tied), ("own", own))}
    assert sizes["tied"].count((128, 64)) == 1 and sizes["own"].count((128, 64)) == 2


def shapes_of(folder: Path) -> list[tuple[int, ...]]:
    """Shapes of all vocabulary-sized tables: FFN weights are stored with their inputs first here."""
    graph = onnx.load(folder / "model.onnx").graph
    tables = {name for node in graph.node if node.op_type in ("Gather", "Gemm") for name in node.input[:2]}
    return [tuple(tensor.dims) for tensor in graph.initializer if tensor.name in tables and len(tensor.dims) == 2]


def test_all_weights_lie_in_one_file_beside_the_graph() -> None:
    exported = exported_family("llama")
    places = [
        {entry.key: entry.value for entry in tensor.external_data}
        for tensor in onnx.load(exported.folder / "model.onnx", load_external_data=False).graph.initializer
        if tensor.external_data
    ]
    stored = sum(int(place["length"]) for place in places)
    assert {place["location"] for place in places} == {"model.onnx.data"} and stored > 300_000
    assert exported.record.touched == ("model.onnx", "model.onnx.data")
    files = (exported.folder / name for name in exported.record.touched)
    assert exported.record.details["size_bytes"] == sum(file.stat().st_size for file in files)


def test_batch_sequence_and_past_are_free_and_named() -> None:
    graph = onnx.load(exported_family("llama").folder / "model.onnx", load_external_data=False).graph
    shapes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    assert shapes == {
        "input_ids": ["batch", "sequence"],
        "attention_mask": ["batch", "past + sequence"],
        "position_ids": ["batch", "sequence"],
        **{f"past_key_values.{i}.{part}": ["batch", 2, "past", 16] for i in (0, 1) for part in ("key", "value")},
        "logits": ["batch", "sequence", 128],
        **{f"present.{i}.{part}": ["batch", 2, "past + sequence", 16] for i in (0, 1) for part in ("key", "value")},
    }


def test_equal_inputs_give_equal_bytes(tmp_path: Path) -> None:
    _, exported = quantized_export(QUICK)
    again = export(exported.source, tmp_path)
    assert digests(again.folder) == digests(exported.folder) and digests(again.evidence) == digests(exported.evidence)


EXPORT = """
import sys, pathlib, torch
from tests.compressors.exported_decoders import export
torch.set_num_threads(1)
export(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
"""


@pytest.mark.slow
def test_another_process_gives_equal_bytes(tmp_path: Path) -> None:
    exported = exported_family("llama")
    arguments = [sys.executable, "-c", EXPORT, str(exported.source), str(tmp_path)]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    subprocess.run(arguments, check=True, capture_output=True, cwd=Path(__file__).parents[2], env=environment)
    assert digests(tmp_path / "exported") == digests(exported.folder)


def digests(folder: Path) -> Mapping[str, str]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


RELOAD = """
import sys, numpy, onnxruntime
from safetensors.numpy import load_file
session = onnxruntime.InferenceSession(sys.argv[1] + "/model.onnx", providers=["CPUExecutionProvider"])
parity = load_file(sys.argv[2] + "/parity.safetensors")
mask = parity["attention_mask"]
feeds = {"input_ids": parity["input_ids"], "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clip(0)}
past = [i for i in session.get_inputs() if i.name.startswith("past")]
feeds |= {i.name: numpy.zeros((len(mask), i.shape[1], 0, i.shape[3]), numpy.float32) for i in past}
(logits,) = session.run(["logits"], feeds)
print(float(numpy.abs(logits - parity["logits"])[mask != 0].max()))
"""


def test_the_file_gives_the_same_in_a_process_without_torch() -> None:
    _, exported = quantized_export(QUICK)
    arguments = [sys.executable, "-c", RELOAD, str(exported.folder), str(exported.evidence)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 2e-5


def test_padding_on_both_sides_is_in_the_parity_reference() -> None:
    exported = exported_family("llama")
    mask = load_file(exported.evidence / "parity.safetensors")["attention_mask"]
    assert exported.record.details["parity_rows"] == len(mask) == 4
    assert any(row[0] == 0 and row[-1] == 1 for row in mask) and any(row[0] == 1 and row[-1] == 0 for row in mask)


def test_companions_stay_and_a_config_loses_only_its_quantization() -> None:
    for exported in (exported_family("llama"), quantized_export(QUICK)[1]):
        kept = companion_files(exported.source)
        assert {"tokenizer.json", "chat_template.jinja", "generation_config.json", "README.md"} <= set(kept)
        assert set(digests(exported.folder)) == {*kept, "config.json", "model.onnx", "model.onnx.data"}
        assert all((exported.folder / name).read_bytes() == (exported.source / name).read_bytes() for name in kept)
        config = json.loads((exported.source / "config.json").read_text())
        config.pop("quantization_config", None)
        assert json.loads((exported.folder / "config.json").read_text()) == config


def test_the_file_tells_nothing_of_the_machine() -> None:
    content = (exported_family("llama").folder / "model.onnx").read_bytes()
    assert b"/" + b"work" not in content and b"site-packages" not in content and b".py" not in content


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "bert"}, "'bert' is no decoder"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic' depends on"),
        ({"intermediate_size": 96}, "instead of"),
        ({"num_hidden_layers": 3}, r"missing tensors, e.g. model\.layers\.2"),
        ({"num_hidden_layers": 1}, r"too many, e.g. model\.layers\.1"),
    ],
)
def test_what_does_not_fit_is_named(fields: dict[str, object], message: str, tmp_path: Path) -> None:
    folder = make_decoder(tmp_path / "model")
    edit_json(folder / "config.json", **fields)
    with pytest.raises(InvalidModel, match=message):
        export(folder, tmp_path)


def test_codes_without_their_config_are_refused(tmp_path: Path) -> None:
    folder = quantize_decoder(tmp_path / "model", SCHEMES["w4 sym 32"]).folder
    edit_json(folder / "config.json", quantization_config=None)
    with pytest.raises(InvalidModel, match="quantization_config"):
        export(folder, tmp_path)


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    folder = make_decoder(tmp_path / "model")
    tensors = load_file(folder / WEIGHTS)
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], np.nan)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(InvalidModel, match=r"model\.norm\.weight"):
        export(folder, tmp_path)
