"""GPTQ on one decoder layer: better than rounding where its inputs tell something, named where they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from compressors.decoder_families import LinearGroup
from compressors.gptq_layers import quantize_layer
from compressors.integer_grid import IntegerGrid, QuantizedWeight, round_to_nearest
from compressors.layer_algorithms import LayerWork
from compressors.rtn import plain_rounding
from modelpress.errors import InvalidModel
from modelpress.quantization_recipes import QuantizeWeights
from tests.compressors.layer_works import InMemory, make_layer, output, relative_change, stored

GRID = IntegerGrid(4, True, 32, torch.float32)
RECIPE = QuantizeWeights(group_size=32)


class OneLinear(nn.Module):
    def __init__(self, w_OI: Tensor) -> None:
        super().__init__()
        self.fc = nn.Linear(w_OI.shape[1], w_OI.shape[0], bias=False)
        self.fc.weight = nn.Parameter(w_OI, requires_grad=False)

    def forward(self, x_BTI: Tensor) -> Tensor:
        return self.fc(x_BTI)  # type: ignore[no-any-return]


def case_weight() -> Tensor:
    """One huge weight on an input that is dead in calibration."""
    w_OI = 0.3 * torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    w_OI[5, 3] = 50.0
    return w_OI


def case_inputs(kind: str) -> Tensor:
    """[N, I]: fewer tokens than inputs, two dead inputs and two twins; `clean` has enough tokens besides."""
    x_NI = torch.randn(12, 32, generator=torch.Generator().manual_seed(2))
    x_NI[:, [3, 7]] = 0
    x_NI[:, 9] = x_NI[:, 8]
    more_NI = torch.randn(200, 32, generator=torch.Generator().manual_seed(3))
    nan_NI = torch.where(torch.arange(32) == 4, torch.nan, x_NI)
    kinds = {"clean": torch.cat([x_NI, more_NI]), "singular": x_NI, "zeros": torch.zeros(12, 32), "with_nan": nan_NI}
    return kinds[kind]


def case_layer(kind: str) -> LayerWork:
    module = OneLinear(case_weight())
    return LayerWork(
        name="model.layers.0",
        module=module,
        linears={"fc": module.fc},
        groups=(LinearGroup(("fc",), None),),
        inputs=InMemory(case_inputs(kind)[None]),
        arguments={},
        grid=GRID,
        device=torch.device("cpu"),
        seed=0,
    )


def output_error(chosen_OI: Tensor, x_NI: Tensor) -> float:
    w_OI = case_weight()
    return float(((w_OI - chosen_OI) @ x_NI.t()).norm() / (w_OI @ x_NI.t()).norm())


@pytest.mark.parametrize("kind", ["clean", "singular"])
def test_dead_twin_and_few_inputs_cost_nothing_over_rounding(kind: str) -> None:
    """Rounding by hand: the row's largest weight on code 7."""
    outcome = quantize_layer(case_layer(kind), RECIPE)
    w_OI, chosen_OI = case_weight(), outcome.weights["fc"].dequantized()
    scale_O1 = w_OI.abs().amax(dim=1, keepdim=True) / 7
    rounded_OI = (w_OI / scale_O1).round() * scale_O1
    assert chosen_OI.isfinite().all()
    assert output_error(chosen_OI, case_inputs(kind)) <= 1.05 * output_error(rounded_OI, case_inputs(kind))
    assert outcome.fallbacks == {}
    assert outcome.details.get("dead inputs of fc") == (2 if kind == "singular" else None)


@pytest.mark.parametrize("kind", ["clean", "singular"])
def test_plain_gptq_costs_nothing_over_rounding_on_the_same_grid(kind: str) -> None:
    outcome = quantize_layer(case_layer(kind), RECIPE.model_copy(update={"clip_search": False, "refine_scales": False}))
    chosen_OI, rounded_OI = outcome.weights["fc"].dequantized(), round_to_nearest(case_weight(), GRID).dequantized()
    assert output_error(chosen_OI, case_inputs(kind)) <= output_error(rounded_OI, case_inputs(kind))


def test_calibration_inputs_that_are_all_zero_are_named_and_the_layer_is_rounded() -> None:
    outcome = quantize_layer(case_layer("zeros"), RECIPE.model_copy(update={"clip_search": False}))
    assert outcome.fallbacks == {"fc": "rounded to nearest: the calibration inputs of this layer are all zero"}
    expected = round_to_nearest(case_weight(), GRID)
    assert torch.equal(outcome.weights["fc"].dequantized(), expected.dequantized())


def test_calibration_inputs_that_are_not_finite_are_refused() -> None:
    with pytest.raises(InvalidModel, match="NaN or too large to be squared"):
        quantize_layer(case_layer("with_nan"), RECIPE)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_the_output_of_a_decoder_layer_is_closer_than_rounded(model_type: str, symmetric: bool) -> None:
    layer = make_layer(model_type, grid=replace(GRID, symmetric=symmetric))
    recipe = RECIPE.model_copy(update={"symmetric": symmetric})
    outcome = quantize_layer(layer, recipe)
    rounded = {f"{n}.weight": plain_rounding(layer.grid, recipe)(w.weight).dequantized() for n, w in _weights(layer)}
    assert set(outcome.weights) == set(layer.linears)
    assert outcome.fallbacks == {}
    assert relative_change(layer, stored(outcome)) < 0.8 * relative_change(layer, rounded)


def test_the_layer_is_left_as_it_was() -> None:
    layer = make_layer()
    before = output(layer)
    quantize_layer(layer, RECIPE)
    assert torch.equal(output(layer), before)
    assert all(not module._forward_pre_hooks for module in layer.module.modules())


def test_only_targets_are_quantized_and_as_if_they_were_alone() -> None:
    """`up_proj` by itself and beside `gate_proj`: the same Hessian, so the same codes but for the last bits of sums."""
    some = quantize_layer(make_layer(targets=["mlp.up_proj"]), RECIPE)
    every = quantize_layer(make_layer(), RECIPE)
    assert set(some.weights) == {"mlp.up_proj"}
    alone, beside = (outcome.weights["mlp.up_proj"] for outcome in (some, every))
    assert isinstance(alone, QuantizedWeight)
    assert isinstance(beside, QuantizedWeight)
    assert (alone.codes_OI == beside.codes_OI).float().mean() > 0.99


def test_equal_inputs_give_equal_bytes() -> None:
    first, second = (stored(quantize_layer(make_layer(), RECIPE)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def _weights(layer: LayerWork) -> list[tuple[str, nn.Linear]]:
    return list(layer.linears.items())
