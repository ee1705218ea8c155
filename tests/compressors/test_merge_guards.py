"""What adapters must not do together, or with the base: each of these was once merged without a word."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelpress.errors import DataLoss
from tests.compressors.lora_merges import (
    ADAPTER,
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
    quiet_peft,
    randomise,
    save,
    tensors_of,
    train,
    write_adapter,
)

HEAD = "score.weight"
TIES = {"combination_type": "ties", "density": 0.5}


def classifier_adapter(folder: Path) -> Path:
    tensors = factors(QUERY, WIDTH, WIDTH) | {f"{PREFIX}{HEAD}": torch.ones(3, WIDTH)}
    fields = {"target_modules": ["q_proj"], "layers_to_transform": [0], "modules_to_save": ["score"]}
    return write_adapter(folder, tensors, task_type="SEQ_CLS", **fields)


@pytest.mark.parametrize("arguments", [TIES, {"combination_type": "dare_linear", "density": 0.5}, {}])
def test_a_head_that_the_base_lacks_is_the_adapters_own_in_every_combination(
    bases: Bases, bench: Bench, tmp_path: Path, arguments: dict
) -> None:
    merged = bench.merge(
        bases.folder("llama"), classifier_adapter(tmp_path / "one"), labels=("a", "b", "c"), **arguments
    )

    assert torch.equal(merged.tensors[HEAD], torch.ones(3, WIDTH))


def test_a_head_that_the_base_lacks_cannot_be_weighed(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    adapter = classifier_adapter(tmp_path / "one")
    error = bench.refused(bases.folder("llama"), (adapter, 0.5), labels=("a", "b", "c"))

    assert HEAD in error.message and "weight" in error.message and "0.5" in error.message


def test_a_resized_embedding_cannot_be_weighed_or_added_to(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    longer = torch.zeros(TOKENS + 6, WIDTH)
    tensors = factors(QUERY, WIDTH, WIDTH) | {
        f"{PREFIX}{name}": longer.clone() for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    fields = {"target_modules": ["q_proj"], "layers_to_transform": [0], "modules_to_save": ["embed_tokens", "lm_head"]}
    adapter = write_adapter(tmp_path / "one", tensors, **fields)

    assert bench.merge(bases.folder("llama"), adapter, **TIES).tensors["lm_head.weight"].shape == longer.shape
    error = bench.refused(bases.folder("llama"), (adapter, 0.7))
    assert "70" in error.message and "64" in error.message and "weight" in error.message


def test_linear_combines_the_factors_of_fused_experts(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    fields = {"target_parameters": ["mlp.experts.down_proj"], "target_modules": []}
    for seed, name in enumerate(("one", "two")):
        save(train(bases.model("mixtral"), seed=seed, **fields), tmp_path / name)
    adapters = [(tmp_path / "one", 0.7), (tmp_path / "two", 0.3)]
    with quiet_peft():
        linear = bench.merge(bases.folder("mixtral"), *adapters, combination_type="linear").tensors
        exact = bench.merge(bases.folder("mixtral"), *adapters).tensors

    before = bases.model("mixtral").state_dict()
    a, b = zip(*(_factors_of(tmp_path / name) for name in ("one", "two")), strict=True)
    roots = [(4.0 * weight) ** 0.5 for weight in (0.7, 0.3)]
    a_sum, b_sum = (sum(root * half for root, half in zip(roots, halves, strict=True)) for halves in (a, b))
    expert = 2
    wanted = before["model.layers.0.mlp.experts.down_proj"][expert] + b_sum[:, :, expert] @ a_sum[expert]
    name = f"model.layers.0.block_sparse_moe.experts.{expert}.w2.weight"
    assert distance(linear[name], wanted) < 1e-5
    assert distance(linear[name], exact[name]) > 1e-3


def _factors_of(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """A [experts, rank, in] and B [out, rank, experts] of the first layer."""
    tensors = tensors_of(folder)
    stem = f"{PREFIX}model.layers.0.mlp.experts.lora"
    a, b = tensors[f"{stem}_A.weight"], tensors[f"{stem}_B.weight"]
    return a.reshape(4, 4, -1), b.reshape(-1, 4, 4)


@pytest.mark.parametrize("method", ["linear", "svd"])
def test_combinations_of_factors_refuse_what_has_none(bases: Bases, bench: Bench, tmp_path: Path, method: str) -> None:
    save(train(bases.model("llama"), target_modules=["q_proj"], use_dora=True), tmp_path / "one")
    arguments = {"combination_type": method, **({"svd_rank": 2} if method == "svd" else {})}
    error = bench.refused(bases.folder("llama"), tmp_path / "one", **arguments)

    assert method in error.message and "q_proj" in error.message and "cat" in error.message


def test_svd_is_the_nearest_change_of_its_rank(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    tensors = factors(QUERY, WIDTH, WIDTH, rank=4)
    adapter = write_adapter(tmp_path / "one", tensors, target_modules=["q_proj"], layers_to_transform=[0])
    name = f"{QUERY}.weight"
    before = bases.model("llama").state_dict()[name]
    merged = bench.merge(bases.folder("llama"), adapter, combination_type="svd", svd_rank=2).tensors[name]

    u, s, vh = torch.linalg.svd(2.0 * delta(tensors, QUERY))
    assert distance(merged - before, (u[:, :2] * s[:2]) @ vh[:2]) < 1e-6


def test_two_adapters_that_train_the_same_bias_are_refused(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    for seed, name in enumerate(("one", "two")):
        fields = {"target_modules": ["q_proj"], "bias": "lora_only", "lora_bias": True}
        save(train(bases.model("biased"), seed=seed, **fields), tmp_path / name)
    error = bench.refused(bases.folder("biased"), tmp_path / "one", tmp_path / "two")

    assert "both replace" in error.message and "q_proj.bias" in error.message


def test_ties_that_nobody_can_name_are_refused(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    save(train(bases.model("tied"), target_modules=["embed_tokens"]), tmp_path / "one")
    base = tmp_path / "base"
    base.mkdir()
    for file in bases.folder("tied").iterdir():
        text = file.read_bytes()
        (base / file.name).write_bytes(text.replace(b"LlamaForCausalLM", b"OwnForCausalLM"))
    error = bench.refused(base, tmp_path / "one")

    assert "tie_word_embeddings" in error.message and "OwnForCausalLM" in error.message


def ia3(bases: Bases, folder: Path, **fields) -> Path:
    from peft import IA3Config, get_peft_model

    modules = {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    with quiet_peft():
        return save(randomise(get_peft_model(bases.model("llama"), IA3Config(**modules, **fields)), seed=3), folder)


def test_other_kinds_may_bring_whole_modules_of_the_bases_shape(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    adapter = ia3(bases, tmp_path / "one", modules_to_save=["lm_head"])
    tensors = load_file(adapter / ADAPTER)
    merged = bench.merge(bases.folder("llama"), adapter)

    saved = next(tensor for name, tensor in tensors.items() if "lm_head" in name)
    assert torch.equal(merged.tensors["lm_head.weight"], saved)
    assert logits(type(bases.model("llama")).from_pretrained(merged.folder)).isfinite().all()


@pytest.mark.parametrize(
    ("change", "mentions"),
    [
        (lambda tensor: tensor[:5], ("lm_head", "[5, 32]", "[64, 32]")),
        (lambda tensor: None, ("lm_head", "missing")),
    ],
)
def test_other_kinds_with_half_or_another_module_are_refused(
    bases: Bases, bench: Bench, tmp_path: Path, change, mentions: tuple[str, ...]
) -> None:
    adapter = ia3(bases, tmp_path / "one", modules_to_save=["lm_head"])
    tensors = load_file(adapter / ADAPTER)
    key = next(name for name in tensors if "lm_head" in name)
    changed = change(tensors.pop(key))
    save_file(tensors | ({} if changed is None else {key: changed.contiguous()}), adapter / ADAPTER)
    error = bench.refused(bases.folder("llama"), adapter)

    assert all(mention in error.message for mention in mentions), error.message


def test_a_base_of_another_kind_is_verified_before_it_is_read(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    adapter = ia3(bases, tmp_path / "one")
    base = bench.source(bases.folder("llama"))
    digest = base.files["model.safetensors"].digest
    blob = bench.root / "store" / "blobs" / "sha256" / digest.hex[:2] / digest.hex
    data = bytearray(blob.read_bytes())
    data[-3] ^= 1
    blob.chmod(0o600)
    blob.write_bytes(bytes(data))

    with pytest.raises(DataLoss):
        bench.merge(bases.folder("llama"), adapter)


def test_other_kinds_ask_nothing_of_layers_that_are_not_loaded(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for file in bases.folder("llama").iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    tensors = load_file(base / "model.safetensors")
    extra = "model.layers.2.self_attn.k_proj.weight"
    tensors[extra] = tensors["model.layers.0.self_attn.k_proj.weight"].clone()
    save_file(tensors, base / "model.safetensors")
    merged = bench.merge(base, ia3(bases, tmp_path / "one"))

    assert extra not in merged.record.touched and torch.equal(merged.tensors[extra], tensors[extra])
