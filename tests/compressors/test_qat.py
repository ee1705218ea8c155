"""Quantization-aware training runs on the grid that ships, lowers the divergence, and resumes to the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from compressors.codebook_grid import CodebookGrid, round_to_codebook
from compressors.integer_grid import IntegerGrid, QuantizedWeight, nearest_codes, round_to_nearest
from compressors.learned_grid import GridLinear, put_on_grid, rounded_once
from compressors.qat import QatTask, step_windows, train
from compressors.stages import SilentMonitor
from modelpress.errors import FailedPrecondition
from modelpress.quantization_recipes import WeightTraining
from tests.compressors.decoders import VOCABULARY, trained_decoder
from tests.compressors.quantizing import Killed, KillingMonitor

HAS_AMX = torch.cpu.get_capabilities().get("amx_bf16", False)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def grid(*, symmetric: bool = True, dtype: torch.dtype = torch.float32) -> IntegerGrid:
    return IntegerGrid(4, symmetric=symmetric, group_size=32, scale_dtype=dtype)


def linear(seed: int = 0) -> nn.Linear:
    layer = nn.Linear(64, 8)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)))
    return layer.requires_grad_(False)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_starts_with_the_codes_given_and_computes_with_them(symmetric: bool, dtype: torch.dtype) -> None:
    layer, on = linear(), grid(symmetric=symmetric, dtype=dtype)
    rounded = round_to_nearest(layer.weight, on)
    codes_OI = (rounded.codes_OI + 1).clamp(on.lowest, on.highest)
    start = QuantizedWeight(on, codes_OI, rounded.scales_OG, rounded.zeros_OG)
    trained, x = GridLinear(layer, start), torch.randn(3, 64)
    assert torch.equal(trained.quantized().codes_OI, codes_OI)
    assert torch.equal(trained(x), nn.functional.linear(x, start.dequantized(), layer.bias))


def test_gradients_pass_rounding_and_stop_where_codes_are_clipped() -> None:
    scales_OG = torch.tensor([[1.0]])
    w_OI = torch.tensor([[0.25, 9.0, *([0.0] * 30)]])
    start = QuantizedWeight(grid(), nearest_codes(w_OI, scales_OG, None, grid=grid()), scales_OG, None)
    layer = nn.Linear(32, 1, bias=False)
    trained = GridLinear(layer, start)
    trained.weight.data.copy_(w_OI)
    trained(torch.ones(1, 32)).sum().backward()
    assert trained.weight.grad is not None
    assert trained.weight.grad[0, :3].tolist() == [1.0, 0.0, 1.0]
    assert trained.scales.grad is not None
    assert trained.scales.grad.item() == pytest.approx((7 - 0.25) / (32 * 7) ** 0.5)


@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_a_codebook_layer_computes_with_what_ships_and_trains_its_weights(name: Literal["nf4", "fp4"]) -> None:
    layer, x = linear(), torch.randn(3, 64)
    start = round_to_codebook(layer.weight, CodebookGrid(name, 64))
    model = nn.Sequential(layer)
    trained = put_on_grid(model, {"0": start})["0"]
    assert torch.equal(trained(x), nn.functional.linear(x, start.dequantized(), layer.bias))
    model(x).sum().backward()
    assert trained.weight.grad is not None
    assert torch.allclose(trained.weight.grad, x.sum(dim=0).expand(8, 64))


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_weight_rounded_once_for_several_passes_gets_the_gradients_of_all(symmetric: bool) -> None:
    layer = linear()
    start = round_to_nearest(layer.weight, grid(symmetric=symmetric))
    each, once = GridLinear(layer, start), GridLinear(layer, start)
    inputs = [torch.randn(3, 64) for _ in range(2)]
    for x in inputs:
        each(x).square().sum().backward()
    with rounded_once([once]):
        for x in inputs:
            once(x).square().sum().backward()
    for name, parameter in each.named_parameters():
        if parameter.requires_grad:
            assert torch.allclose(parameter.grad, once.get_parameter(name).grad, rtol=1e-4, atol=1e-5)


def test_every_pass_shows_each_window_once() -> None:
    shown = [window for step in range(6) for window in step_windows(4, step, size=2, seed=1)]
    assert [sorted(shown[first : first + 4]) for first in (0, 4, 8)] == [[0, 1, 2, 3]] * 3
    assert shown[:4] != shown[4:8] or shown[4:8] != shown[8:]


@pytest.mark.parametrize("symmetric", [True, False])
def test_training_lowers_the_divergence(symmetric: bool) -> None:
    result = train(task(symmetric=symmetric, steps=10), SilentMonitor())
    assert result.after < 0.8 * result.before
    assert set(result.weights) == set(task().weights)


def test_the_start_is_kept_where_training_is_no_better() -> None:
    given = task(steps=2, learning_rate=1.0)
    result = train(given, SilentMonitor())
    assert all(torch.equal(w.codes_OI, given.weights[name].codes_OI) for name, w in result.weights.items())
    assert result.after == result.before


def test_a_checkpoint_of_a_machine_that_computes_in_another_type_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = KillingMonitor(tmp_path / "checkpoint")
    with pytest.raises(Killed):
        train(task(), monitor)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": not HAS_AMX})
    with pytest.raises(FailedPrecondition, match=r"written with products 'torch\.\w+', this training has 'torch\.\w+'"):
        train(task(), monitor)


def test_a_run_that_is_killed_at_each_checkpoint_ends_with_the_same_bytes(tmp_path: Path) -> None:
    whole = train(task(steps=6), SilentMonitor())
    monitor = KillingMonitor(tmp_path / "checkpoint")
    for _ in range(3):
        with pytest.raises(Killed):
            train(task(steps=6), monitor)
    resumed = train(task(steps=6), monitor)
    assert resumed.after == whole.after
    for name, weight in whole.weights.items():
        assert torch.equal(weight.codes_OI, resumed.weights[name].codes_OI)
        assert torch.equal(weight.scales_OG, resumed.weights[name].scales_OG)


def task(*, symmetric: bool = True, steps: int = 4, learning_rate: float = 3e-4) -> QatTask:
    teacher = AutoModelForCausalLM.from_pretrained(trained_decoder(), dtype=torch.float32).eval().requires_grad_(False)
    weights = {
        name: round_to_nearest(module.weight, grid(symmetric=symmetric))
        for name, module in teacher.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    }
    training = WeightTraining(steps=steps, batch_size=4, learning_rate=learning_rate, checkpoint_every=2)
    return QatTask(teacher, weights, random_ids(), training, seed=3)


def random_ids() -> Tensor:
    return torch.randint(4, VOCABULARY, (8, 24), generator=torch.Generator().manual_seed(0))
