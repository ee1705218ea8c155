"""The stage as a whole: what it writes, records and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compressors.compute_types import products_dtype
from compressors.integer_grid import IntegerGrid, round_to_nearest
from compressors.weight_files import DTYPE_NAMES
from modelpress.digests import digest_file
from modelpress.errors import InvalidModel, InvalidRecipe
from tests.compressors.decoders import CHAT_TEMPLATE, make_decoder, trained_decoder
from tests.compressors.quantizing import DATASET, Bench
from tests.compressors.stored_models import weights_of, write_weights

LAYER = "model.layers.0"
SCHEMES = (
    {"scheme": "w4a16"},
    {"scheme": "w4a16", "symmetric": False},
    {"scheme": "w8a16", "group_size": None},
    {"scheme": "w8a8", "group_size": None, "smooth_quant": 0.5},
    {"scheme": "nf4"},
    {"scheme": "fp4"},
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only."""
    return make_decoder(tmp_path_factory.mktemp("decoders") / "llama")


@pytest.fixture
def bench(tmp_path: Path, model: Path) -> Bench:
    return Bench(tmp_path, model)


def test_a_weight_is_stored_as_the_codes_and_scales_that_rounding_gives(bench: Bench, model: Path):
    record, manifest = bench.run_uncalibrated(clip_search=False)
    stored, base = weights_of(bench.folder(manifest)), load_file(model / "model.safetensors")
    expected = round_to_nearest(base[f"{LAYER}.mlp.up_proj.weight"], IntegerGrid(4, True, 32, torch.float32))
    module = f"{LAYER}.mlp.up_proj"
    assert torch.equal(stored[f"{module}.weight_scale"], expected.scales_OG)
    packed_OW = stored[f"{module}.weight_packed"]
    nibbles = [((packed_OW >> (4 * place)) & 15) - 8 for place in range(8)]
    assert torch.equal(torch.stack(nibbles, dim=-1).reshape(128, 64), expected.codes_OI.int())
    assert stored[f"{module}.weight_shape"].tolist() == [128, 64]
    assert record.layers[0].error is None


def test_each_decoder_layer_is_one_file_and_everything_else_another(bench: Bench):
    _, manifest = bench.run_uncalibrated()
    folder = bench.folder(manifest)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert sorted(set(index["weight_map"].values())) == files == sorted(p.name for p in folder.glob("*.safetensors"))
    assert {n for n, path in index["weight_map"].items() if path == files[0]} == {
        "model.embed_tokens.weight",
        "model.norm.weight",
    }
    assert all(n.startswith("model.layers.1.") for n, path in index["weight_map"].items() if path == files[2])
    tensors = weights_of(folder)
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


def test_tokenizer_chat_template_and_companions_keep_their_bytes(bench: Bench, model: Path):
    _, manifest = bench.run_uncalibrated()
    kept = {path.name for path in model.iterdir()} - {"config.json", "model.safetensors"}
    assert kept >= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}
    for name in kept:
        assert manifest.entry(name).digest == digest_file(model / name)
    assert (bench.folder(manifest) / "chat_template.jinja").read_text() == CHAT_TEMPLATE


def test_config_keeps_every_field_and_names_what_stays_float(bench: Bench, model: Path):
    _, manifest = bench.run_uncalibrated(ignore=("lm_head", "re:.*layers\\.1\\.self_attn"))
    config = json.loads((bench.folder(manifest) / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == json.loads((model / "config.json").read_text())
    attention = [f"model.layers.1.self_attn.{name}_proj" for name in "qkvo"]
    assert quantization["ignore"] == [*attention, "lm_head"]


def test_embeddings_norms_and_head_keep_their_bytes(tmp_path: Path):
    bench = Bench(tmp_path, make_decoder(tmp_path / "model", tie=False, dtype="bfloat16"))
    _, manifest = bench.run()
    stored, base = weights_of(bench.folder(manifest)), load_file(tmp_path / "model/model.safetensors")
    names = [name for name in base if "proj" not in name]
    assert {"lm_head.weight", "model.embed_tokens.weight", f"{LAYER}.input_layernorm.weight"} <= set(names)
    assert all(torch.equal(stored[name], base[name]) and stored[name].dtype == torch.bfloat16 for name in names)


def test_a_tied_head_stays_tied(bench: Bench):
    _, manifest = bench.run_uncalibrated()
    folder = bench.folder(manifest)
    assert "lm_head.weight" not in weights_of(folder)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_scales_are_stored_in_the_dtype_of_the_weights(tmp_path: Path, dtype: str):
    bench = Bench(tmp_path, make_decoder(tmp_path / "model", dtype=dtype))
    _, manifest = bench.run_uncalibrated()
    assert weights_of(bench.folder(manifest))[f"{LAYER}.mlp.up_proj.weight_scale"].dtype == getattr(torch, dtype)


def test_shards_of_the_base_change_nothing(tmp_path: Path, bench: Bench, model: Path):
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    for path in model.iterdir():
        if path.name != "model.safetensors":
            (sharded / path.name).write_bytes(path.read_bytes())
    write_weights(load_file(model / "model.safetensors"), sharded, shards=3)
    other = Bench(tmp_path / "other", sharded)
    assert other.run()[1].digest == bench.run()[1].digest


@pytest.mark.parametrize("fields", SCHEMES, ids=lambda fields: "-".join(map(str, fields.values())))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_size_is_predicted_within_one_percent(tmp_path: Path, fields: dict[str, object], dtype: str):
    record, manifest = Bench(tmp_path, make_decoder(tmp_path / "model", dtype=dtype, tie=False)).run(**fields)
    written = sum(entry.size_bytes for entry in manifest.files if entry.path.endswith(".safetensors"))
    assert record.details["written_bytes"] == written
    assert record.details["predicted_bytes"] == pytest.approx(written, rel=0.01)


def test_the_record_names_every_linear_layer_and_the_calibration(bench: Bench):
    record, _ = bench.run(ignore=("lm_head", "model.layers.1.mlp.down_proj"))
    assert [layer.name for layer in record.layers[:7]] == [
        *(f"{LAYER}.self_attn.{name}_proj" for name in "qkvo"),
        *(f"{LAYER}.mlp.{name}_proj" for name in ("gate", "up", "down")),
    ]
    kept = record.layers[-1]
    assert (kept.name, kept.algorithm, kept.num_bits, kept.group_size) == (
        "model.layers.1.mlp.down_proj",
        "none",
        32,
        None,
    )
    assert record.touched == tuple(f"{layer.name}.weight" for layer in record.layers[:-1])
    assert record.details["calibration"] == {
        "dataset": str(DATASET),
        "windows": 8,
        "windows_available": 50,
        "sequence_length": 32,
        "tokens": 256,
    }
    assert record.details["error_tokens"] == 256
    assert record.details["products"] == str(products_dtype(torch.device("cpu"))).removeprefix("torch.")
    assert record.details["bits_per_weight"] == pytest.approx(4 + 32 / 32, abs=0.03)  # float32 scales, and shapes


def test_clipping_is_recorded_against_plain_rounding_on_the_same_grid(tmp_path: Path):
    record, _ = Bench(tmp_path, trained_decoder()).run()
    plain, _ = Bench(tmp_path / "plain", trained_decoder()).run(clip_search=False)
    first = record.layers[0]
    assert 0 < first.error != first.rounding_error
    assert first.rounding_error == plain.layers[0].error == plain.layers[0].rounding_error


def test_smoothing_moves_the_norms_and_is_measured_on_the_same_outputs(bench: Bench, model: Path):
    record, manifest = bench.run(scheme="w8a8", group_size=None, smooth_quant=0.8)
    name = f"{LAYER}.input_layernorm.weight"
    stored, base = weights_of(bench.folder(manifest)), load_file(model / "model.safetensors")
    assert not torch.equal(stored[name], base[name])
    assert all(layer.error < 0.02 and layer.rounding_error < 0.02 for layer in record.layers)


def test_a_layer_that_no_group_divides_stays_float_and_is_named(tmp_path: Path):
    bench = Bench(tmp_path, make_decoder(tmp_path / "model", intermediate_size=96))
    record, manifest = bench.run(group_size=64, max_fallback_share=0.2)
    kept = [layer for layer in record.layers if layer.fallback]
    assert [layer.name for layer in kept] == ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]
    assert all(layer.algorithm == "none" and "96 inputs" in layer.fallback for layer in kept)
    assert record.details["fallback_share"] == pytest.approx(2 / 14)
    config = json.loads((bench.folder(manifest) / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == [*(layer.name for layer in kept), "lm_head"]


def test_more_fallbacks_than_the_recipe_allows_are_refused_before_anything_is_written(tmp_path: Path):
    bench = Bench(tmp_path, make_decoder(tmp_path / "model", intermediate_size=96))
    before = bench.blobs()
    with pytest.raises(InvalidRecipe, match=r"2 of 14 targets cannot.*model.layers.0.mlp.down_proj: its 96 inputs"):
        bench.run(group_size=64, max_fallback_share=0.1)
    assert bench.blobs() == before


def test_scales_have_the_weights_dtype_only_where_the_weights_have_one(tmp_path: Path):
    model = make_decoder(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].bfloat16()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    bench = Bench(tmp_path, model)
    with pytest.raises(
        InvalidModel, match=f"'{name}' has dtype bfloat16, .* has float32: save the model in one"
    ) as caught:
        bench.run()
    assert caught.value.field == name
    _, manifest = bench.run(scale_dtype="float32")
    stored = weights_of(bench.folder(manifest))
    assert {tensor.dtype for name, tensor in stored.items() if name.endswith("_scale")} == {torch.float32}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("fields", [{}, {"scheme": "w8a16", "group_size": None}])
def test_a_weight_that_is_not_finite_is_named_before_anything_is_written(
    tmp_path: Path, value: float, fields: dict[str, object]
):
    model = make_decoder(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 7] = value
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    bench = Bench(tmp_path, model)
    before = bench.blobs()
    with pytest.raises(InvalidModel, match=r"model.layers.1.mlp.down_proj.weight") as caught:
        bench.run(**fields)
    assert caught.value.reason == "NON_FINITE"
    assert bench.blobs() == before


@pytest.mark.parametrize(("fields", "step"), [({}, 2 / 15), ({"scheme": "w8a16", "group_size": None}, 2 / 255)])
def test_rows_of_zeros_constants_and_subnormals_get_finite_scales(
    tmp_path: Path, fields: dict[str, object], step: float
):
    model, name = make_decoder(tmp_path / "model"), "model.layers.0.mlp.down_proj"
    tensors = load_file(model / "model.safetensors")
    w_OI = tensors[f"{name}.weight"]
    w_OI[0], w_OI[1], w_OI[2], w_OI[3] = 0, 0.5, 1e-40, -3.0
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    bench = Bench(tmp_path, model)
    _, manifest = bench.run(clip_search=False, **fields)
    stored = weights_of(bench.folder(manifest))
    assert all(torch.isfinite(tensor).all() for tensor in stored.values())
    scales_O = stored[f"{name}.weight_scale"][:4, 0].tolist()
    tiny = torch.finfo(torch.float32).tiny
    assert scales_O == pytest.approx([tiny, 0.5 * step, tiny, 3 * step])


def test_activations_that_overflow_name_the_calibration_and_the_layer(tmp_path: Path):
    model = make_decoder(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"] *= 1e38
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        InvalidModel, match=r"model.layers.0 gives NaN or infinite activations on the calibration texts"
    ):
        Bench(tmp_path, model).run()


def test_scales_that_do_not_fit_their_dtype_are_refused(tmp_path: Path):
    model = make_decoder(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = 1e6
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidModel, match=r"down_proj.weight_scale.*does not fit float16.*'gptq' files cannot hold"):
        Bench(tmp_path, model).run_uncalibrated(scale_dtype="float16", clip_search=False)


def test_what_needs_calibration_is_refused_without(bench: Bench):
    with pytest.raises(InvalidRecipe, match="smooth_quant needs calibration texts: add a training dataset"):
        bench.run_uncalibrated(scheme="w8a8", group_size=None, smooth_quant=0.5)


def test_windows_longer_than_the_model_reads_are_refused(bench: Bench):
    with pytest.raises(InvalidRecipe, match="sequence_length: 512 is more than the 256 tokens"):
        bench.run(sequence_length=512)


def test_weights_in_other_formats_are_left_out_and_named(tmp_path: Path):
    model = make_decoder(tmp_path / "model")
    (model / "pytorch_model.bin").write_bytes(b"stale")
    record, manifest = Bench(tmp_path, model).run_uncalibrated()
    assert manifest.entry("pytorch_model.bin") is None
    assert record.warnings == ("pytorch_model.bin was left out: it holds the weights as they were before",)


def test_equal_inputs_and_seed_give_equal_bytes_and_another_seed_other_windows(bench: Bench):
    (first, one), (_, again), (other, _) = (bench.run(seed=seed) for seed in (3, 3, 4))
    assert one.digest == again.digest
    assert first.layers[0].error != other.layers[0].error


def test_every_stored_dtype_is_one_that_safetensors_names(bench: Bench):
    _, manifest = bench.run()
    assert {tensor.dtype for tensor in weights_of(bench.folder(manifest)).values()} <= DTYPE_NAMES.keys()
