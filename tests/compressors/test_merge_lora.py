"""A merge as a whole: which adapters, what stays byte for byte, what is written anew, what the record says of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from compressors import merge_lora
from modelpress.digests import digest_bytes
from modelpress.errors import InvalidRecipe
from tests.compressors.conftest import AdapterMaker
from tests.compressors.lora_merges import (
    PREFIX,
    QUERY,
    TOKENS,
    WIDTH,
    Bases,
    Bench,
    delta,
    distance,
    factors,
    logits,
    save,
    tensors_of,
    train,
    write_adapter,
)
from tests.compressors.stored_models import same, weights_of

INDEX = "model.safetensors.index.json"
SHARDS = "20KB"
"""Makes several shards of the tiny bases."""


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """Rank 4, alpha 8, on one module of the first layer."""
    return write_adapter(tmp_path / "adapter", factors(QUERY, 32, WIDTH), target_modules=[QUERY])


def test_only_the_adapters_that_the_recipe_names_are_merged(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    base = bases.folder("llama")
    one, two = (
        write_adapter(tmp_path / str(seed), factors(QUERY, 32, WIDTH, seed=seed), target_modules=[QUERY])
        for seed in (1, 2)
    )

    chosen, alone = bench.merge(base, one, two, adapters=("two",)), bench.merge(base, two)

    assert same(chosen.tensors, alone.tensors)
    assert [facts["name"] for facts in chosen.record.details["adapters"]] == ["two"]
    with pytest.raises(InvalidRecipe, match=r"'three'.*one, two"):
        bench.merge(base, one, two, adapters=("three",))
    with pytest.raises(InvalidRecipe, match="needs an adapter"):
        bench.merge(base)


def test_every_byte_that_no_adapter_touches_stays(bases: Bases, bench: Bench, adapter: Path) -> None:
    base = bases.folder("llama")

    merged = bench.merge(base, adapter)

    before, after = (folder / "model.safetensors" for folder in (base, merged.folder))
    changed = {
        position for position, (x, y) in enumerate(zip(before.read_bytes(), after.read_bytes(), strict=True)) if x != y
    }
    with safe_open(before, "pt") as file:
        names = file.offset_keys()
    header = int.from_bytes(before.read_bytes()[:8], "little")
    begin, end = json.loads(before.read_bytes()[8 : 8 + header])[f"{QUERY}.weight"]["data_offsets"]
    assert changed
    assert changed <= set(range(8 + header + begin, 8 + header + end))
    with safe_open(after, "pt") as file:
        assert file.offset_keys() == names


def test_the_files_beside_the_weights_are_the_bases(bases: Bases, bench: Bench, adapter: Path) -> None:
    base = bases.folder("llama", shards=SHARDS)

    merged = bench.merge(base, adapter).folder

    assert {file.name for file in merged.iterdir()} == {file.name for file in base.iterdir()}
    for name in ("config.json", "generation_config.json", "tokenizer.json", "README.md", INDEX):
        assert (merged / name).read_bytes() == (base / name).read_bytes()


def test_weights_in_other_formats_are_left_out_and_named(bases: Bases, bench: Bench, adapter: Path, tmp_path) -> None:
    base = tmp_path / "base"
    bases.model("llama").save_pretrained(base)
    (base / "pytorch_model.bin").write_bytes(b"old")
    (base / "onnx").mkdir()
    (base / "onnx/model.onnx").write_bytes(b"old")
    (base / "other.safetensors").write_bytes(b"old")

    merged = bench.merge(base, adapter)

    left = [path.relative_to(merged.folder).as_posix() for path in merged.folder.rglob("*") if path.is_file()]
    assert sorted(left) == ["config.json", "generation_config.json", "model.safetensors"]
    assert [warning.split(" ")[0] for warning in merged.record.warnings] == [
        "onnx/model.onnx",
        "other.safetensors",
        "pytorch_model.bin",
    ]


@pytest.mark.parametrize("kind", ["llama", "tied"])
def test_shards_do_not_change_a_value(kind: str, bases: Bases, bench: Bench, tmp_path: Path) -> None:
    targets = ["q_proj", "down_proj", "lm_head"]
    adapter = save(train(bases.model(kind), target_modules=targets), tmp_path / "adapter")

    whole, parts = (bench.merge(bases.folder(kind, shards=size), adapter) for size in ("1GB", SHARDS))

    assert same(whole.tensors, parts.tensors)
    assert whole.record == parts.record
    assert len(list(parts.folder.glob("*.safetensors"))) > 3


def test_a_shard_that_changes_nothing_is_the_stored_one(bases: Bases, bench: Bench, adapter: Path) -> None:
    base = bases.folder("llama", shards=SHARDS)
    holder = json.loads((base / INDEX).read_text())["weight_map"][f"{QUERY}.weight"]

    merged = bench.merge(base, adapter).folder

    differ = {f.name for f in base.glob("*.safetensors") if f.read_bytes() != (merged / f.name).read_bytes()}
    assert differ == {holder}


@pytest.mark.parametrize(
    ("target", "tokens", "dtype"),
    [("lm_head", TOKENS, "stored"), ("q_proj", TOKENS + 6, "stored"), ("q_proj", TOKENS, "bfloat16")],
    ids=["an untied head", "more tokens", "another dtype"],
)
def test_the_index_is_written_anew_where_it_would_be_wrong(target, tokens, dtype, bases, bench, tmp_path) -> None:
    model = bases.model("tied")
    if tokens != TOKENS:
        model.resize_token_embeddings(tokens)
    trained = train(model, target_modules=[target])
    adapter = save(trained, tmp_path / "adapter", save_embedding_layers=tokens != TOKENS)

    merged = bench.merge(bases.folder("tied", shards=SHARDS), adapter, output_dtype=dtype)

    index = json.loads((merged.folder / INDEX).read_text())
    found = {path.name: load.keys() for path in merged.folder.glob("*.safetensors") if (load := opened(path))}
    assert index["weight_map"] == {name: path for path, names in found.items() for name in names}
    assert index["metadata"] == {
        "total_parameters": sum(tensor.numel() for tensor in merged.tensors.values()),
        "total_size": sum(tensor.nbytes for tensor in merged.tensors.values()),
    }
    assert distance(merged.logits(type(model)), logits(trained)) < (1e-5 if dtype == "stored" else 0.1)


def opened(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping


def test_the_record_says_what_changed_and_how_far(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    trained = train(bases.model("tied"), target_modules=["q_proj", "lm_head"], alpha_pattern={"lm_head": 4})
    adapter = save(trained, tmp_path / "adapter")
    base = bases.folder("tied")

    merged = bench.merge(base, (adapter, 0.5))

    before, after, record = weights_of(base), merged.tensors, merged.record
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert (record.method, record.version) == ("merge_lora", merge_lora.VERSION)
    assert sorted(record.touched) == sorted([*changed, "lm_head.weight"])
    original = before | {"lm_head.weight": before["model.embed_tokens.weight"]}
    assert record.details["relative_change"] == {
        name: pytest.approx(float((after[name] - original[name]).norm() / original[name].norm()), rel=1e-5)
        for name in (*changed, "lm_head.weight")
    }
    assert record.details["tensors_added"] == ["lm_head.weight"]
    assert record.details["tensors_byte_identical"] == len(before) - len(changed)
    assert record.details["config_changes"] == {"tie_word_embeddings": [True, False]}
    assert merged.config["tie_word_embeddings"] is False
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    assert any("lm_head.weight was tied to model.embed_tokens.weight" in warning for warning in record.warnings)
    assert record.details["adapters"] == [
        {"name": "one", "weight": 0.5, "peft_type": "LORA", "edits": {"low_rank": 3}, "ranks": [4], "scalings": [1, 4]}
    ]


def test_a_trained_module_that_did_not_move_is_named(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    other = QUERY.replace("layers.0", "layers.1")
    still = {name: tensor * 0 for name, tensor in factors(other, 32, WIDTH).items()}
    adapter = write_adapter(tmp_path / "adapter", factors(QUERY, 32, WIDTH) | still, target_modules=["q_proj"])

    record = bench.merge(bases.folder("llama"), adapter).record

    assert record.touched == (f"{QUERY}.weight",)
    assert record.warnings == (f"{other}.weight was trained, and kept its bytes",)


def test_a_scaling_of_rslora_is_alpha_by_the_root_of_the_rank(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    module = "model.layers.1.mlp.down_proj"
    lora = factors(module, 32, 48, rank=16)
    settings = {"r": 16, "lora_alpha": 16, "use_rslora": True, "target_modules": ["down_proj"]}
    adapter = write_adapter(tmp_path / "adapter", lora, layers_to_transform=[1], **settings)
    base = bases.folder("llama")

    merged = bench.merge(base, adapter)

    weight = weights_of(base)[f"{module}.weight"]
    assert torch.equal(merged.tensors[f"{module}.weight"], weight + 4 * delta(lora, module))
    assert merged.record.details["adapters"][0]["scalings"] == [16 / math.sqrt(16)]


def test_a_trained_bias_of_lora_b_is_scaled_with_it(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    bias = torch.linspace(-1, 1, 32)
    lora = factors(QUERY, 32, WIDTH) | {f"{PREFIX}{QUERY}.lora_B.bias": bias}
    adapter = write_adapter(tmp_path / "adapter", lora, lora_alpha=32, lora_bias=True, target_modules=[QUERY])
    base = bases.folder("biased")

    merged = bench.merge(base, adapter).tensors[f"{QUERY}.bias"]

    assert torch.equal(merged, weights_of(base)[f"{QUERY}.bias"] + 8 * bias)


def test_a_bert_classifier_keeps_its_trained_head(bert: Path, make_adapter: AdapterMaker, bench: Bench) -> None:
    adapter = make_adapter(r=4, lora_alpha=6)

    merged = bench.merge(bert, adapter)

    assert torch.equal(merged.tensors["classifier.weight"], tensors_of(adapter)[f"{PREFIX}classifier.weight"])
    assert digest_bytes((merged.folder / "config.json").read_bytes()) == digest_bytes(
        (bert / "config.json").read_bytes()
    )
