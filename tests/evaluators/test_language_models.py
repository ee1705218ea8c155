"""An open language model computes what its folder means, whatever the layout, and leaves the folder as it was."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from evaluators.language_models import open_language_model
from evaluators.local_weights import LocalWeights
from evaluators.quantized_reading import plain
from evaluators.runtimes import Resources
from modelpress.errors import InvalidModel
from tests.compressors.decoders import make_decoder
from tests.evaluators.quantized_decoders import LAYOUTS, quantize

IDS = torch.tensor([[5, 9, 77, 30, 12, 64, 8, 101]])
ALL = torch.ones_like(IDS)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_decoder(tmp_path_factory.mktemp("decoders") / "base")


def digests(folder):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def plain_logits(folder, values):
    """By transformers alone: the base's own model with other values in its linear layers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict({name: value.float() for name, value in values.items()}, strict=False)
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_float_model_gives_the_logits_of_transformers(tmp_path, model_type):
    folder = make_decoder(tmp_path / "m", model_type=model_type, dtype="bfloat16")
    opened = open_language_model(folder, Resources())
    assert torch.allclose(opened.logits(IDS, ALL), plain_logits(folder, {}), atol=1e-5)
    assert opened.runtime.endswith("cpu float32")


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "w8a8"])
def test_a_quantized_model_computes_with_the_values_that_its_layout_means(base, tmp_path, layout):
    values = quantize(base, tmp_path / "q", layout)
    weights = plain(LocalWeights.open(tmp_path / "q"))
    assert all(torch.equal(weights.load(name), value) for name, value in values.items())
    assert {name: tensor.shape for name, tensor in weights.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in load_file(base / "model.safetensors").items()
    }
    logits = open_language_model(tmp_path / "q", Resources()).logits(IDS, ALL)
    assert torch.allclose(logits, plain_logits(base, values), atol=1e-5)


@pytest.mark.parametrize("layout", ["pack-quantized", "w8a8"])
def test_a_compressed_model_gives_the_logits_of_from_pretrained(base, tmp_path, layout):
    quantize(base, tmp_path / "q", layout)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32)
    with torch.no_grad():
        expected = reference(IDS).logits
    assert torch.allclose(open_language_model(tmp_path / "q", Resources()).logits(IDS, ALL), expected, atol=1e-4)


def test_w8a8_rounds_activations_of_each_token_for_itself(base, tmp_path):
    values = quantize(base, tmp_path / "q", "w8a8")
    opened = open_language_model(tmp_path / "q", Resources())
    whole = opened.logits(IDS, ALL)
    assert not torch.allclose(whole, plain_logits(base, values), atol=1e-4)
    assert torch.allclose(opened.logits(IDS[:, :3], ALL[:, :3]), whole[:, :3], atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_are_computed_in_the_scales_dtype_not_in_the_models(base, tmp_path, dtype):
    values = quantize(base, tmp_path / "q", "pack-quantized", scale_dtype=dtype)
    weights = plain(LocalWeights.open(tmp_path / "q"))
    assert all(torch.equal(weights.load(name), value) and value.dtype == dtype for name, value in values.items())


@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_opening_and_running_changes_no_file_and_no_answer(base, tmp_path, layout):
    """A forward pass of bitsandbytes on a CPU repacks the weight in place: here nothing is what it was read from."""
    folder = tmp_path / "m"
    _ = shutil.copytree(base, folder) if layout is None else quantize(base, folder, layout)
    before = digests(folder)
    opened = open_language_model(folder, Resources())
    first = opened.logits(IDS, ALL)
    opened.greedy([5, 9], max_new_tokens=4, stop=frozenset())
    assert torch.equal(opened.logits(IDS, ALL), first)
    assert torch.equal(open_language_model(folder, Resources()).logits(IDS, ALL), first)
    assert digests(folder) == before


def test_padding_on_either_side_changes_nothing(base):
    opened = open_language_model(base, Resources())
    alone = opened.logits(IDS, ALL)[0]
    rows = torch.tensor([[0] * 3 + IDS[0].tolist(), IDS[0].tolist() + [0] * 3])
    mask = torch.tensor([[0] * 3 + [1] * 8, [1] * 8 + [0] * 3])
    left, right = opened.logits(rows, mask)
    assert torch.allclose(left[3:], alone, atol=1e-5)
    assert torch.allclose(right[:8], alone, atol=1e-5)


def test_greedy_takes_the_most_likely_token_and_ends_with_the_first_stop_token(base):
    opened = open_language_model(base, Resources())
    ids = IDS[0].tolist()
    expected = list(ids)
    for _ in range(6):
        row = torch.tensor([expected])
        expected.append(int(opened.logits(row, torch.ones_like(row))[0, -1].argmax()))
    new = expected[len(ids) :]
    assert opened.greedy(ids, max_new_tokens=6, stop=frozenset()) == new
    stopped = opened.greedy(ids, max_new_tokens=6, stop=frozenset({new[2]}))
    assert stopped == new[: new.index(new[2]) + 1]


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def set_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), "1 tensors of the model are not in its files, first 'model.norm.weight'"),
        (lambda t: t.update(extra=torch.ones(2)), "1 tensors in the model's files have no place in it, first 'extra'"),
        (lambda t: t.update({NORM: torch.ones(3)}), "do not have the shapes"),
    ],
)
def test_every_stored_tensor_has_its_place_and_none_is_made_up(tmp_path, change, message):
    folder = make_decoder(tmp_path / "m")
    rewrite(folder, change)
    with pytest.raises(InvalidModel, match=message):
        open_language_model(folder, Resources())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, "is no decoder language model"),
        ({"model_type": "unheard_of"}, "no class 'LlamaForCausalLM' for the model_type 'unheard_of'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq' is unknown; known: compressed-tensors"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "bits 3 and checkpoint_format 'gptq'"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "0 config_groups|refuses its"),
        ({"vocab_size": 100}, "do not have the shapes"),
    ],
)
def test_a_config_that_is_no_language_model_of_ours_is_refused(tmp_path, fields, message):
    folder = make_decoder(tmp_path / "m")
    set_config(folder, **fields)
    with pytest.raises(InvalidModel, match=message):
        open_language_model(folder, Resources())


@pytest.mark.parametrize("part", ["scales", "qzeros", "g_idx"])
def test_a_part_that_is_missing_in_gptq_is_named(base, tmp_path, part):
    quantize(base, tmp_path / "q", "gptq")
    rewrite(tmp_path / "q", lambda tensors: tensors.pop(f"model.layers.0.mlp.up_proj.{part}"))
    with pytest.raises(InvalidModel, match=f"up_proj.qweight' has no {part} beside it"):
        open_language_model(tmp_path / "q", Resources())


def test_groups_that_gptq_does_not_have_are_refused(base, tmp_path):
    quantize(base, tmp_path / "q", "gptq")
    rewrite(tmp_path / "q", lambda tensors: tensors["model.layers.0.mlp.up_proj.g_idx"].fill_(9))
    with pytest.raises(InvalidModel, match=r"the parts of 'model.layers.0.mlp.up_proj' do not fit"):
        open_language_model(tmp_path / "q", Resources())


def test_code_that_a_config_names_is_not_run(tmp_path):
    folder = make_decoder(tmp_path / "m")
    (folder / "modeling_evil.py").write_text("raise SystemExit('code of the model was run')")
    set_config(folder, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "modeling_evil.Config"})
    assert open_language_model(folder, Resources()).logits(IDS, ALL).shape == (1, 8, 128)


def test_shards_are_read_through_their_index(base, tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(base, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in halves.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    logits = [open_language_model(path, Resources()).logits(IDS, ALL) for path in (base, folder)]
    assert torch.equal(*logits)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the maps of a process are read from /proc")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_open_model_maps_no_file(base, tmp_path, layout):
    """A private map counts whole against a worker's memory limit, once for each tensor that was read through one."""
    quantize(base, tmp_path / "q", layout)
    opened = [open_language_model(folder, Resources()) for folder in (base, tmp_path / "q")]
    maps = Path("/proc/self/maps").read_text()
    assert str(tmp_path / "q") not in maps and str(base) not in maps
    assert all(model.logits(IDS, ALL).isfinite().all() for model in opened)
