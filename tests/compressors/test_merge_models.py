"""Merging checkpoints: the methods' formulas, the same bytes from any shards and after any stop, the record."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft.utils import merge_utils
from torch import Tensor

from compressors import merge_models
from compressors.stages import NamedSource, SilentMonitor
from compressors.task_vectors import drop_and_rescale, mask_seed
from modelpress.digests import digest_bytes
from modelpress.errors import InvalidModel
from tests.compressors.stored_models import (
    BASE,
    CONFIG,
    METHODS,
    SHAPES,
    A,
    B,
    Tensors,
    Workbench,
    random_tensors,
    same,
    settings,
    weights_of,
)


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    return Workbench(tmp_path)


def expected(formula: Callable[..., Tensor], *models: Tensors) -> Tensors:
    """`formula(base, *models)` of every floating tensor."""
    merged = {name: formula(BASE[name], *(model[name] for model in models)) for name in SHAPES}
    return {**merged, "position_ids": BASE["position_ids"]}


def assert_close(merged: Tensors, wanted: Tensors) -> None:
    assert merged.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(merged[name], tensor, rtol=1e-6, atol=1e-6)


def test_linear_adds_weighted_task_vectors(bench: Workbench) -> None:
    _, merged = bench.merge(BASE, (A, 0.3), (B, -0.2))

    assert_close(merged, expected(lambda base, a, b: base + 0.3 * (a - base) - 0.2 * (b - base), A, B))


def test_one_model_of_weight_1_comes_out_as_it_is(bench: Workbench) -> None:
    _, merged = bench.merge(BASE, (A, 1.0))

    assert same(merged, A)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("copies", [2, 3])
def test_the_average_of_equal_models_is_one_of_them(bench: Workbench, dtype: torch.dtype, copies: int) -> None:
    base, model = random_tensors(0, dtype=dtype), random_tensors(1, dtype=dtype)

    _, merged = bench.merge(base, *[(model, 1 / copies)] * copies)

    assert same(merged, model)


def test_the_average_with_the_base_is_the_average_of_two_models(bench: Workbench) -> None:
    _, with_base = bench.merge(A, (B, 0.5))
    _, of_two = bench.merge(BASE, (A, 0.5), (B, 0.5))

    assert same(with_base, of_two)


def test_bfloat16_is_rounded_once(bench: Workbench) -> None:
    base, a, b = (random_tensors(seed, dtype=torch.bfloat16) for seed in range(3))

    _, merged = bench.merge(base, (a, 0.5), (b, 0.5))

    for name in SHAPES:
        assert torch.equal(merged[name], (0.5 * a[name].float() + 0.5 * b[name].float()).bfloat16())


def test_float64_is_merged_in_float64(bench: Workbench) -> None:
    base, a = random_tensors(0, dtype=torch.float64), random_tensors(1, dtype=torch.float64)
    a["embed.weight"] = base["embed.weight"] + 2.0**-40

    _, merged = bench.merge(base, (a, 0.5))

    assert torch.equal(merged["embed.weight"], base["embed.weight"] + 2.0**-41)


@pytest.mark.parametrize("method", ["total", "frequency"])
def test_ties_is_pefts_on_the_task_vectors(bench: Workbench, method: str) -> None:
    def ties(base: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return base + merge_utils.ties([a - base, b - base], torch.tensor([0.8, 0.6]), 0.5, method)

    record, merged = bench.merge(
        BASE, (A, 0.8), (B, 0.6), merge_method="ties", density=0.5, majority_sign_method=method
    )

    merged["logit_scale"] = BASE["logit_scale"]  # of one value PEFT keeps none, int(0.5), and this merge one
    assert_close(merged, expected(ties, A, B) | {"logit_scale": BASE["logit_scale"]})
    assert 0 < record.details["sign_conflicts"]["mean"] < record.details["sign_conflicts"]["largest"] <= 1


def test_ties_of_one_whole_model_is_linear(bench: Workbench) -> None:
    _, by_ties = bench.merge(BASE, (A, 0.7), merge_method="ties", density=1.0)
    _, linear = bench.merge(BASE, (A, 0.7))

    assert_close(by_ties, linear)


def test_dare_drops_by_seed_model_and_tensor(bench: Workbench) -> None:
    def dropped(model: Tensors, model_name: str, tensor: str) -> Tensor:
        generator = torch.Generator().manual_seed(mask_seed(7, name=model_name, tensor=tensor))
        return drop_and_rescale((model[tensor] - BASE[tensor]).reshape(-1), 0.4, generator).reshape(SHAPES[tensor])

    _, merged = bench.merge(BASE, (A, 0.5), (B, 0.7), merge_method="dare_linear", density=0.4, seed=7)

    for name in SHAPES:
        wanted = BASE[name] + 0.5 * dropped(A, "a", name) + 0.7 * dropped(B, "b", name)
        torch.testing.assert_close(merged[name], wanted, rtol=1e-6, atol=1e-6)


def test_another_seed_drops_others(bench: Workbench) -> None:
    merged = [bench.merge(BASE, (A, 1.0), merge_method="dare_ties", density=0.5, seed=seed)[1] for seed in (1, 1, 2)]

    assert same(merged[0], merged[1])
    assert not same(merged[0], merged[2])


def test_slerp_ends_at_the_model(bench: Workbench) -> None:
    assert same(bench.merge(BASE, (A, 1.0), merge_method="slerp")[1], A)


def test_slerp_begins_at_the_base_which_is_no_merge(bench: Workbench) -> None:
    with pytest.raises(InvalidModel, match="changes nothing"):
        bench.merge(BASE, (A, 0.0), merge_method="slerp")


def test_slerp_halves_the_angle_of_every_tensor(bench: Workbench) -> None:
    other = random_tensors(1) | {"logit_scale": BASE["logit_scale"]}

    record, merged = bench.merge(BASE, (other, 0.5), merge_method="slerp")

    angles = []
    for name in (name for name, shape in SHAPES.items() if shape):
        start, end = BASE[name].double().flatten(), other[name].double().flatten()
        angles.append(math.acos(float(start @ end / (start.norm() * end.norm()))))
        weight = math.sin(angles[-1] / 2) / math.sin(angles[-1])
        torch.testing.assert_close(merged[name].double().flatten(), weight * (start + end), rtol=1e-6, atol=1e-6)
    assert record.details["angle_rad"] == pytest.approx({"smallest": min(angles), "largest": max(angles)})


@pytest.mark.parametrize("method", METHODS)
def test_what_the_models_share_keeps_its_bytes(bench: Workbench, method: str) -> None:
    base = BASE | {"embed.weight": torch.full((20, 8), -0.0)}
    model = base | {"layers.0.weight": A["layers.0.weight"].clone()}
    base["layers.0.weight"] = base["layers.0.weight"].clone()
    base["layers.0.weight"][1] = -0.0
    model["layers.0.weight"][1:3] = base["layers.0.weight"][1:3]

    record, merged = bench.merge(base, (model, 0.75), **settings(method))

    assert record.touched == ("layers.0.weight",)
    assert record.details["tensors_byte_identical"] == len(base) - 1
    assert same(merged | {"layers.0.weight": base["layers.0.weight"]}, base)
    shared = (merged["layers.0.weight"][1:3], base["layers.0.weight"][1:3])
    assert method == "slerp" or torch.equal(*(rows.view(torch.int32) for rows in shared))


@pytest.mark.parametrize("method", METHODS)
def test_shards_do_not_change_values(bench: Workbench, method: str) -> None:
    outputs = []
    for of_base, of_model in ((1, 3), (3, 1)):
        base, model = bench.model(BASE, shards=of_base), bench.model(A, shards=of_model)
        outputs.append(weights_of(bench.run(base, NamedSource("a", model, 0.6), **settings(method))[1]))

    assert same(*outputs)


class Stopped(Exception):
    """Where a worker is killed."""


class StoppingMonitor(SilentMonitor):
    """Keeps checkpoints in `folder`, and stops when checkpoint number `stop_at` is kept: an attempt of a stage."""

    def __init__(self, folder: Path, *, stop_at: int) -> None:
        self._folder = folder
        self._left = stop_at

    def save_checkpoint(self, step: int, write: Callable[[Path], None]) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        write(self._folder)
        self._left -= 1
        if self._left == 0:
            raise Stopped

    def checkpoint(self) -> Path | None:
        return self._folder if self._folder.exists() else None


@pytest.mark.parametrize("stop_at", [1, 2, 3])
@pytest.mark.parametrize("method", ["slerp", "dare_ties"])
def test_a_merge_goes_on_to_the_same_bytes_and_record(bench: Workbench, method: str, stop_at: int) -> None:
    base, model = bench.model(BASE, shards=3), NamedSource("a", bench.model(A), 0.6)
    at_once, whole = bench.run(base, model, **settings(method))
    whole_bytes = {file.name: file.read_bytes() for file in whole.iterdir() if file.is_file()}
    folder = bench.folder / "checkpoint"

    with pytest.raises(Stopped):
        bench.run(base, model, monitor=StoppingMonitor(folder, stop_at=stop_at), **settings(method))
    resumed, output = bench.run(base, model, monitor=StoppingMonitor(folder, stop_at=0), **settings(method))

    assert {file.name: file.read_bytes() for file in output.iterdir() if file.is_file()} == whole_bytes
    assert resumed == at_once


def test_everything_beside_the_weights_is_the_bases(bench: Workbench) -> None:
    files = {"pytorch_model.bin": "stale", "consolidated.safetensors": "stale", "tokenizer.json": "{}"}
    base = bench.model(BASE, shards=3, files=files, rope_theta=1e4)
    model = bench.model(A, files={"README.md": "another"}, rope_theta=1e6, sliding_window=64, _name_or_path="x")

    record, output = bench.run(base, NamedSource("a", model, 0.5))

    kept = {"config.json", "model.safetensors.index.json", "README.md", "sub/labels.txt", "tokenizer.json"}
    written = {file.relative_to(output).as_posix(): file.read_bytes() for file in output.rglob("*") if file.is_file()}
    assert written.keys() - kept == {f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}
    assert all(base.files[path].digest == digest_bytes(written[path]) for path in kept)
    assert record.warnings == (
        "model 'a' has other config values than the base, whose are kept: rope_theta (1000000.0 there, 10000.0 here), "
        "sliding_window (64 there, not given here)",
        "model 'a' has another tokenizer.json than the base, whose is kept: its token ids may stand for other tokens",
        "consolidated.safetensors was left out: it holds the weights as they were before",
        "pytorch_model.bin was left out: it holds the weights as they were before",
    )


def test_the_record_says_what_was_merged_and_how_far_it_moved(bench: Workbench) -> None:
    half = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in A.items()}

    record, merged = bench.merge(BASE, (half, 0.5), merge_method="ties", density=0.3, seed=4)

    facts = record.details
    assert (record.method, record.version, facts["merge_method"]) == ("merge_models", merge_models.VERSION, "ties")
    assert (facts["models"], facts["density"], facts["seed"]) == ([{"name": "a", "weight": 0.5}], 0.3, 4)
    assert facts["dtypes"] == {
        "base": {"F32": 6, "I64": 1},
        "model a": {"BF16": 6, "I64": 1},
        "output": {"F32": 6, "I64": 1},
    }
    assert facts["relative_change"] == {
        name: pytest.approx(float((merged[name] - BASE[name]).norm() / BASE[name].norm()), rel=1e-4) for name in SHAPES
    }
    assert facts["sign_conflicts"] == {"largest": 0.0, "mean": 0.0}
    assert (facts["tensors_added"], facts["tensors_byte_identical"]) == ([], 1)


def test_the_output_dtype_stands_in_the_config(bench: Workbench) -> None:
    base, model = bench.model(BASE, torch_dtype="float32"), bench.model(A)

    _, output = bench.run(base, NamedSource("a", model, 1.0), output_dtype="bfloat16")

    assert {t.dtype for t in weights_of(output).values()} == {torch.bfloat16, torch.int64}
    assert torch.equal(weights_of(output)["embed.weight"], A["embed.weight"].bfloat16())
    assert json.loads((output / "config.json").read_text()) == {**CONFIG, "torch_dtype": "bfloat16"}
