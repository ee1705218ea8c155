"""Several adapters: PEFT's own combinations where PEFT has them exactly, the papers' formulas elsewhere."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compressors.lora_merges import (
    PREFIX,
    QUERY,
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
from tests.compressors.stored_models import weights_of

WEIGHTS = (0.7, -0.4)
LINEAR = ["q_proj", "down_proj"]
Pair = tuple[Path, Path]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """Rank 4 and rank 2, alpha 8 each: scalings 2 and 4."""
    one = write_adapter(tmp_path / "one", factors(QUERY, 32, 32), target_modules=[QUERY])
    two = write_adapter(tmp_path / "two", factors(QUERY, 32, 32, rank=2, seed=2), r=2, target_modules=[QUERY])
    return one, two


def deltas(pair: Pair) -> tuple[Tensor, Tensor]:
    return 2.0 * delta(tensors_of(pair[0]), QUERY), 4.0 * delta(tensors_of(pair[1]), QUERY)


@pytest.fixture
def change(bases: Bases, bench: Bench, pair: Pair):
    """change(weights, **arguments): what the merge of the pair adds to the weight."""

    def change(weights: tuple[float, float] = WEIGHTS, seed: int = 0, **arguments: Any) -> Tensor:
        base = bases.folder("llama")
        merged = bench.merge(base, *zip(pair, weights, strict=True), seed=seed, **arguments)
        return merged.tensors[f"{QUERY}.weight"] - weights_of(base)[f"{QUERY}.weight"]

    return change


def close(left: Tensor, right: Tensor) -> bool:
    return torch.allclose(left, right, rtol=0, atol=1e-6)


def test_cat_is_the_weighted_sum_bit_for_bit(bases: Bases, bench: Bench, pair: Pair) -> None:
    base, (one, two) = bases.folder("llama"), deltas(pair)

    merged = bench.merge(base, *zip(pair, WEIGHTS, strict=True)).tensors[f"{QUERY}.weight"]

    assert torch.equal(merged, (one * WEIGHTS[0] + two * WEIGHTS[1]) + weights_of(base)[f"{QUERY}.weight"])


def test_a_weight_of_zero_and_opposite_weights_change_nothing_that_the_other_does(change, pair: Pair) -> None:
    assert close(change((1.0, 0.0)), deltas(pair)[0])
    assert close(change((0.0, 1.0)), deltas(pair)[1])


@pytest.mark.parametrize("weights", [(0.7, 0.3), (1.5, 1.0), (1.0, -0.5)])
@pytest.mark.parametrize("base", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "merge",
    [
        {"combination_type": "cat"},
        {"combination_type": "linear"},
        {"combination_type": "svd", "svd_rank": 3},
        {"combination_type": "svd", "svd_rank": 8},
    ],
    ids=lambda merge: " ".join(map(str, merge.values())),
)
def test_what_peft_combines_is_combined_as_peft_runs_it(merge, base, weights, bases: Bases, bench, tmp_path) -> None:
    from peft import LoraConfig

    fields = {"target_modules": LINEAR} if base == "llama" else {"target_modules": ["c_attn"], "fan_in_fan_out": True}
    model = train(bases.model(base), **fields)
    with quiet_peft():
        model.add_adapter("two", LoraConfig(**({"r": 4, "lora_alpha": 16} | fields | {"lora_alpha": 6})))
        model.set_adapter("two")
        randomise(model, seed=2)
        model.add_weighted_adapter(["default", "two"], list(weights), "both", **merge)
        folder = save(model, tmp_path / "adapters")
        model.set_adapter("both")

    adapters = zip((folder, folder / "two"), weights, strict=True)
    merged = bench.merge(bases.folder(base), *adapters, **merge)

    assert distance(merged.logits(type(bases.model(base))), logits(model.eval())) < 2e-5


def test_adapters_on_different_modules_each_count(bases: Bases, bench: Bench, pair: Pair, tmp_path: Path) -> None:
    other = QUERY.replace("q_proj", "o_proj")
    lora = factors(other, 32, 32, seed=5)
    third = write_adapter(tmp_path / "three", lora, target_modules=["layers.0.self_attn.o_proj"])
    base = bases.folder("llama")

    for combination in ("cat", "linear"):
        merged = bench.merge(base, (pair[0], 0.5), (third, 2.0), combination_type=combination)
        for module, expected in ((QUERY, 0.5 * deltas(pair)[0]), (other, 4.0 * delta(lora, other))):
            assert close(merged.tensors[f"{module}.weight"] - weights_of(base)[f"{module}.weight"], expected)


def test_linear_needs_equal_ranks(bases: Bases, bench: Bench, pair: Pair) -> None:
    message = bench.refused(bases.folder("llama"), *pair, combination_type="linear").message

    assert all(part in message for part in ("linear", f"{QUERY}.weight", "'one': 4", "'two': 2", "cat")), message


def test_linear_scales_rslora_adapters_by_the_root_of_their_rank(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    """PEFT 0.21 multiplies such a combination by the root of the rank once more: the formula is the reference."""
    lora = [factors(QUERY, 32, 32, seed=seed) for seed in (1, 2)]
    adapters = [
        (write_adapter(tmp_path / str(number), tensors, target_modules=[QUERY], use_rslora=True), weight)
        for number, (tensors, weight) in enumerate(zip(lora, (0.5, 2.0), strict=True))
    ]
    base, scales = bases.folder("llama"), [(weight * 8 / math.sqrt(4)) ** 0.5 for _, weight in adapters]
    a, b = (
        sum(s * t[f"{PREFIX}{QUERY}.lora_{half}.weight"] for s, t in zip(scales, lora, strict=True)) for half in "AB"
    )

    merged = bench.merge(base, *adapters, combination_type="linear").tensors[f"{QUERY}.weight"]

    assert close(merged - weights_of(base)[f"{QUERY}.weight"], b @ a)


def test_svd_is_the_nearest_matrix_of_that_rank(change, pair: Pair) -> None:
    full = WEIGHTS[0] * deltas(pair)[0] + WEIGHTS[1] * deltas(pair)[1]
    values = torch.linalg.svdvals(full.double())

    for rank in (1, 3, 6):
        cut = change(combination_type="svd", svd_rank=rank)
        assert float((cut - full).norm()) == pytest.approx(float(values[rank:].norm()), abs=2e-6)
        assert int((torch.linalg.svdvals(cut.double()) > 1e-5).sum()) == rank


@pytest.mark.parametrize("method", ["total", "frequency"])
@pytest.mark.parametrize("density", [0.25, 1.0])
def test_ties_is_the_papers_on_the_changes(density: float, method: str, change, pair: Pair) -> None:
    trimmed = [trim(vector, density) for vector in deltas(pair)]
    votes = trimmed if method == "total" else [vector.sign() for vector in trimmed]
    elected = torch.where(sum(votes) >= 0, 1.0, -1.0)
    agreeing = [(vector.sign() == elected).float() for vector in trimmed]
    weighted = sum(w * vector * mine for w, vector, mine in zip(WEIGHTS, trimmed, agreeing, strict=True))
    expected = weighted / sum(agreeing).clamp(min=1)

    merged = change(combination_type="ties", density=density, majority_sign_method=method)

    assert close(merged, expected)


def trim(vector: Tensor, density: float) -> Tensor:
    kept = int(density * vector.numel())
    smallest = vector.abs().flatten().sort(descending=True).values[kept - 1]
    return torch.where(vector.abs() >= smallest, vector, 0.0)


def test_dare_drops_each_value_or_divides_it_by_the_density(change, pair: Pair) -> None:
    one, two = (w * vector / 0.4 for w, vector in zip(WEIGHTS, deltas(pair), strict=True))

    merged = change(combination_type="dare_linear", density=0.4)

    choices = torch.stack([torch.zeros_like(one), one, two, one + two])
    distances = (choices - merged).abs()
    assert float(distances.min(0).values.max()) < 1e-6
    shares = torch.bincount(distances.argmin(0).flatten(), minlength=4) / one.numel()
    assert torch.allclose(shares, torch.tensor([0.36, 0.24, 0.24, 0.16]), atol=0.05)


@pytest.mark.parametrize("combination", ["dare_linear", "dare_ties"])
def test_the_seed_decides_what_is_dropped(combination: str, change) -> None:
    first, again, other = (change(combination_type=combination, density=0.5, seed=seed) for seed in (3, 3, 4))

    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_dare_at_full_density_drops_nothing(change, pair: Pair) -> None:
    one, two = deltas(pair)

    assert close(change(combination_type="dare_linear", density=1.0), WEIGHTS[0] * one + WEIGHTS[1] * two)
    assert torch.equal(*(change(combination_type=method, density=1.0) for method in ("dare_ties", "ties")))


def test_a_dora_adapter_at_half_weight_adds_half_of_its_change(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    adapter = save(train(bases.model("llama"), target_modules=LINEAR, use_dora=True), tmp_path / "adapter")
    base, name = bases.folder("llama"), f"{QUERY}.weight"

    whole, half = (bench.merge(base, (adapter, weight)).tensors[name] for weight in (1.0, 0.5))

    weight = weights_of(base)[name]
    assert close(half - weight, (whole - weight) / 2)
    assert f"{PREFIX}{QUERY}.lora_magnitude_vector" in tensors_of(adapter)
