"""Layers loaded one by one compute what transformers' whole model computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from compressors.activations import BATCH_TOKENS, Activations
from compressors.decoder_layers import DecoderLayers, family_of
from compressors.layer_algorithms import layer_output
from compressors.weight_files import WeightFiles, read_json
from modelpress.errors import InvalidModel
from service.storage.store import ContentStore
from service.storage.stored_folders import StoredFolder
from tests.compressors.decoders import make_decoder

CPU = torch.device("cpu")
MODELS = (
    {"model_type": "llama"},
    {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    {"model_type": "mistral", "sliding_window": 8},
    {"model_type": "qwen2"},
    {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    {"model_type": "qwen3"},
)


def opened(folder: Path, root: Path) -> DecoderLayers:
    store = ContentStore(str(root / "store"), scratch=root / "scratch")
    source = StoredFolder(store.put_folder(folder), store)
    return DecoderLayers.open(WeightFiles.read(source), read_json(source, "config.json"), device=CPU)


@pytest.mark.parametrize("fields", MODELS, ids=lambda fields: "-".join(map(str, fields.values())))
def test_every_family_gives_the_hidden_states_of_the_whole_model(tmp_path: Path, fields: dict[str, object]):
    folder = make_decoder(tmp_path / "model", **fields)
    decoder = opened(folder, tmp_path)
    ids_BT = torch.randint(4, 128, (3, 24), generator=torch.Generator().manual_seed(1))
    whole = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        expected = whole(input_ids=ids_BT, output_hidden_states=True).hidden_states
        hidden_BTH = decoder.embedding()(ids_BT)
        for number, arguments in enumerate(decoder.arguments(24)):
            torch.testing.assert_close(hidden_BTH, expected[number], rtol=0, atol=1e-4)
            hidden_BTH = layer_output(decoder.load(number), hidden_BTH, arguments)
        torch.testing.assert_close(whole.model.norm(hidden_BTH), expected[-1], rtol=0, atol=1e-4)


def test_the_embedding_table_is_read_once_for_any_number_of_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    decoder, load, names = opened(make_decoder(tmp_path / "model"), tmp_path), WeightFiles.load, []
    monkeypatch.setattr(WeightFiles, "load", lambda files, name: names.append(name) or load(files, name))
    ids_NT = torch.zeros(3, BATCH_TOKENS, dtype=torch.long)
    Activations.embed(ids_NT, decoder.embedding(), path=tmp_path / "0", device=CPU)
    assert names == ["model.embed_tokens.weight"]


def test_a_layer_is_in_float32_whatever_is_stored(tmp_path: Path):
    folder = make_decoder(tmp_path / "model", dtype="bfloat16")
    layer = opened(folder, tmp_path).load(1)
    stored = load_file(folder / "model.safetensors")
    for name, parameter in layer.named_parameters():
        assert parameter.dtype == torch.float32 and not parameter.requires_grad
        assert torch.equal(parameter, stored[f"model.layers.1.{name}"].float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"),
            r"'model.layers.1.mlp.up_proj.weight' is mi",
        ),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}), r"'model.norm.weight' is \[63\], and"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(64).double()}), "has dtype float64: save"),
    ],
)
def test_tensors_that_do_not_make_the_model_are_named(tmp_path: Path, change, message: str):
    folder = make_decoder(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidModel, match=message):
        opened(folder, tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "bert"}, "model_type 'bert' is no decoder that is known: quantize one of llama, mistral"),
        ({}, "model_type None is no decoder"),
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, "quantized already"),
    ],
)
def test_models_of_another_kind_are_refused(config: dict[str, object], message: str):
    with pytest.raises(InvalidModel, match=message):
        family_of(config)


def test_a_config_that_makes_no_model_is_refused_in_one_line(tmp_path: Path):
    folder = make_decoder(tmp_path / "model")
    text = (folder / "config.json").read_text().replace('"hidden_act": "silu"', '"hidden_act": "unheard of"')
    (folder / "config.json").write_text(text)
    with pytest.raises(InvalidModel, match=r"config.json makes no model: ") as caught:
        opened(folder, tmp_path)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("tie", [True, False])
def test_the_whole_model_gives_the_logits_of_the_stored_one(tmp_path: Path, tie: bool):
    folder = make_decoder(tmp_path / "model", tie=tie)
    ids_BT = torch.randint(4, 128, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids_BT).logits
        torch.testing.assert_close(opened(folder, tmp_path).whole()(input_ids=ids_BT).logits, expected)
