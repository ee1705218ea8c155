"""SignRound learns roundings on the grid that ships, and never does worse than plain rounding."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from compressors.integer_grid import IntegerGrid, round_to_nearest
from compressors.signround import OFFSETS, SHARES, Learned, RoundingProblem, rounding_problem
from compressors.signround_layers import Lesson, learn, quantize_layer, squared_error
from modelpress.quantization_recipes import QuantizeWeights, WeightTraining
from tests.compressors.layer_works import InMemory, make_layer, mean_loss, output, relative_change, stored, with_tensors

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def grid(group_size: int | None = 32, *, symmetric: bool = True, dtype: torch.dtype = torch.float32) -> IntegerGrid:
    return IntegerGrid(4, symmetric=symmetric, group_size=group_size, scale_dtype=dtype)


def recipe(*, steps: int = 20, symmetric: bool = True, learning_rate: float | None = None) -> QuantizeWeights:
    training = WeightTraining(steps=steps, batch_size=4, learning_rate=learning_rate)
    return QuantizeWeights(algorithm="signround", group_size=32, symmetric=symmetric, training=training)


def random_weight(*, outputs: int = 8, inputs: int = 128) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))


def random_learned(problem: RoundingProblem) -> Learned:
    learned, generator = problem.start(), torch.Generator().manual_seed(1)
    learned.offsets_OI.uniform_(*OFFSETS, generator=generator)
    learned.low_OG.uniform_(0.6, 1.1, generator=generator)
    learned.high_OG.uniform_(0.6, 1.1, generator=generator)
    return learned


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 64, 128, None])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_start_is_rounding_to_nearest(symmetric: bool, group_size: int | None, dtype: torch.dtype) -> None:
    w_OI, on = random_weight(), grid(group_size, symmetric=symmetric, dtype=dtype)
    w_OI[0] = 0
    problem = rounding_problem(w_OI, on)
    weight, rounded = problem.rounded(problem.start()).weight, round_to_nearest(w_OI, on)
    assert torch.equal(weight.codes_OI, rounded.codes_OI)
    assert torch.equal(weight.dequantized(), rounded.dequantized())


@pytest.mark.parametrize("symmetric", [True, False])
def test_gradients_are_those_of_rounding_that_lets_them_through(symmetric: bool) -> None:
    w_OI, on = random_weight(), grid(symmetric=symmetric)
    problem = rounding_problem(w_OI, on)
    learned = random_learned(problem)
    leaves = Learned(*(t.requires_grad_() for t in (learned.offsets_OI, learned.low_OG, learned.high_OG)))
    q_OI = straight_through(w_OI, leaves, symmetric=symmetric)
    g_OI = torch.randn(q_OI.shape, generator=torch.Generator().manual_seed(2))
    (q_OI * g_OI).sum().backward()
    with torch.no_grad():
        rounded = problem.rounded(learned)
        found = problem.gradients(g_OI, rounded)
    assert torch.allclose(rounded.weight.dequantized(), q_OI, atol=1e-6)
    assert torch.allclose(found.offsets_OI, leaves.offsets_OI.grad, atol=1e-5)
    assert torch.allclose(found.high_OG, leaves.high_OG.grad, atol=1e-4)
    if not symmetric:
        assert torch.allclose(found.low_OG, leaves.low_OG.grad, atol=1e-4)


def straight_through(w_OI: Tensor, learned: Learned, *, symmetric: bool) -> Tensor:
    """The quantized weight by autograd alone: what SignRound's equations say, with groups of 32 and 4 bits."""
    w_OGK, v_OGK = w_OI.unflatten(1, (-1, 32)), learned.offsets_OI.unflatten(1, (-1, 32))
    high_OG = w_OGK.abs().amax(-1) if symmetric else w_OGK.amax(-1).clamp(min=0)
    low_OG = -high_OG * learned.high_OG if symmetric else w_OGK.amin(-1).clamp(max=0) * learned.low_OG
    s_OG1 = ((high_OG * learned.high_OG - low_OG) / 15)[..., None]
    z_OG1 = torch.zeros_like(s_OG1) if symmetric else round_through(-8 - low_OG[..., None] / s_OG1)
    codes_OGK = (round_through(w_OGK / s_OG1 + v_OGK + z_OG1.detach()) + z_OG1 - z_OG1.detach()).clamp(-8, 7)
    return ((codes_OGK - z_OG1) * s_OG1).flatten(1)


def round_through(x: Tensor) -> Tensor:
    return x + (x.round() - x).detach()


def test_a_step_goes_against_the_signs_and_stays_in_bounds() -> None:
    learned = Learned(torch.tensor([[0.0, 0.49, -0.2]]), torch.tensor([[1.0]]), torch.tensor([[0.505]]))
    learned.descend(Learned(torch.tensor([[3.0, -9.0, 0.0]]), torch.tensor([[-1e-9]]), torch.tensor([[2.0]])), rate=0.1)
    assert learned.offsets_OI.tolist() == [[pytest.approx(-0.1), OFFSETS[1], pytest.approx(-0.2)]]
    assert learned.low_OG.tolist() == [[pytest.approx(1.1)]]
    assert learned.high_OG.tolist() == [[SHARES[0]]]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_weights_that_are_trained_on_are_those_that_ship(symmetric: bool, dtype: torch.dtype) -> None:
    lesson = Lesson.of(make_layer("qwen2", grid=grid(symmetric=symmetric, dtype=dtype)))
    learn(lesson, WeightTraining(steps=3, batch_size=4))
    for name, rounded in lesson.put().items():
        weight = rounded.weight
        assert torch.equal(lesson.layer.linears[name].weight, weight.dequantized())
        assert weight.scales_OG.dtype == dtype
        assert bool((weight.scales_OG > 0).all())


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_output_comes_nearer_than_by_rounding(model_type: str, symmetric: bool) -> None:
    layer = make_layer(model_type, grid=grid(symmetric=symmetric))
    rounded = {f"{n}.weight": round_to_nearest(m.weight, layer.grid).dequantized() for n, m in layer.linears.items()}
    outcome = quantize_layer(copy.deepcopy(layer), recipe(symmetric=symmetric))
    assert relative_change(layer, stored(outcome)) < relative_change(layer, rounded)
    works = [with_tensors(layer, tensors) for tensors in (stored(outcome), rounded)]
    losses = [mean_loss(work.run(layer.inputs.hidden_NTH), output(layer)) for work in works]
    assert outcome.details == pytest.approx({"loss": losses[0], "loss of rounding": losses[1]}, rel=1e-3)
    assert losses[0] < 0.8 * losses[1]


@pytest.mark.parametrize("steps", [1, 4])
def test_no_loss_is_above_that_of_rounding(steps: int) -> None:
    layer = make_layer("qwen2")
    outcome = quantize_layer(copy.deepcopy(layer), recipe(steps=steps, learning_rate=0.25))
    assert outcome.details["loss"] <= outcome.details["loss of rounding"]


def test_the_loss_is_a_share_of_the_wanted_output() -> None:
    wanted_BTH = torch.tensor([[[3.0, 0.0], [0.0, 4.0]]])
    assert squared_error(torch.zeros(1, 2, 2), wanted_BTH).item() == 1
    assert squared_error(wanted_BTH * 1.1, wanted_BTH).item() == pytest.approx(0.01)
    assert squared_error(torch.zeros(1, 2, 2), torch.zeros(1, 2, 2)).item() == 0


def test_rounding_is_kept_where_learning_is_no_better() -> None:
    layer = make_layer()
    outcome = quantize_layer(copy.deepcopy(layer), recipe(steps=2, learning_rate=1.0))
    assert outcome.details["loss"] == outcome.details["loss of rounding"]
    for name, weight in outcome.weights.items():
        assert torch.equal(weight.dequantized(), round_to_nearest(layer.linears[name].weight, layer.grid).dequantized())


def test_rounding_is_kept_where_the_learned_loss_is_not_a_number() -> None:
    """The layer gives NaN as soon as a weight is another than plain rounding makes it."""
    layer = make_layer()
    plain = {n: round_to_nearest(m.weight, layer.grid).dequantized() for n, m in layer.linears.items()}

    def damage(module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
        same = all(torch.equal(module.get_parameter(f"{name}.weight"), w_OI) for name, w_OI in plain.items())
        return out if same else out * float("nan")

    layer.module.register_forward_hook(damage)
    outcome = quantize_layer(layer, recipe(steps=4))
    assert outcome.details["loss"] == outcome.details["loss of rounding"] > 0
    assert all(torch.equal(weight.dequantized(), plain[name]) for name, weight in outcome.weights.items())


def test_what_was_lost_before_the_layer_is_made_up_for() -> None:
    layer = make_layer()
    assert isinstance(layer.inputs, InMemory)
    noise_NTH = 0.05 * torch.randn(layer.inputs.hidden_NTH.shape, generator=torch.Generator().manual_seed(5))
    late = replace(layer, inputs=InMemory(layer.inputs.hidden_NTH * (1 + noise_NTH)))
    outcome = quantize_layer(copy.deepcopy(late), recipe())
    wanted_NTH = output(layer)
    loss = mean_loss(output(with_tensors(late, stored(outcome))), wanted_NTH)
    assert outcome.details["loss"] == pytest.approx(loss, rel=1e-3)


def test_equal_seeds_give_equal_bytes_and_others_others() -> None:
    first, second = (quantize_layer(make_layer("qwen3"), recipe(steps=12)).weights for _ in range(2))
    other = quantize_layer(replace(make_layer("qwen3"), seed=4), recipe(steps=12)).weights
    for name, weight in first.items():
        assert torch.equal(weight.codes_OI, second[name].codes_OI)
        assert torch.equal(weight.scales_OG, second[name].scales_OG)
    assert any(not torch.equal(weight.scales_OG, other[name].scales_OG) for name, weight in first.items())
