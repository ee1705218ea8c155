"""AWQ scales channels without changing the function, and never does worse than rounding."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from compressors.awq import EXPONENTS, InputStatistics, best_rounding, output_error, scales_of, search_scales
from compressors.awq_layers import input_statistics, quantize_layer, stacked_weights
from compressors.integer_grid import IntegerGrid, fit_grid, round_to_nearest
from compressors.layer_algorithms import LayerWork
from compressors.layer_channels import move_scales, possible_scales, scalable_channels, tensors_of
from modelpress.quantization_recipes import QuantizeWeights
from tests.compressors.layer_works import make_layer, output, relative_change, stored, with_tensors

FULL_HEADS = {"num_key_value_heads": 4}


def grid(group_size: int = 32, *, symmetric: bool = True, dtype: torch.dtype = torch.float32) -> IntegerGrid:
    return IntegerGrid(4, symmetric=symmetric, group_size=group_size, scale_dtype=dtype)


def recipe(**fields: object) -> QuantizeWeights:
    return QuantizeWeights.model_validate({"algorithm": "awq", **fields})


def statistics(x_NI: Tensor) -> InputStatistics:
    return InputStatistics(x_NI.t() @ x_NI, x_NI.abs().mean(dim=0))


def test_the_scales_are_powers_of_the_mean_magnitude_about_one() -> None:
    assert scales_of(torch.tensor([1.0, 4.0, 16.0]), 0.5).tolist() == [0.5, 1.0, 2.0]


def test_a_channel_that_is_always_zero_counts_as_the_smallest() -> None:
    assert scales_of(torch.tensor([0.0, 4.0, 16.0]), 0.5).tolist() == pytest.approx([0.5**0.5, 0.5**0.5, 2**0.5])


def test_the_output_error_is_that_of_the_product() -> None:
    x_NI = torch.tensor([[1.0, 2.0], [3.0, -1.0]])
    change_OI = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    assert output_error(change_OI, x_NI.t() @ x_NI) == pytest.approx(1 + 9 + 1.5**2 + 1.0)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_the_search_finds_less_error_than_rounding(symmetric: bool, group_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    w_OI = torch.randn(16, 128, generator=generator)
    x_NI = torch.randn(256, 128, generator=generator) * torch.exp(2 * torch.randn(128, generator=generator))
    known, on = statistics(x_NI), grid(group_size, symmetric=symmetric)
    chosen = search_scales(w_OI, known, grid=on, possible=lambda scales_I: scales_I)
    rounded = output_error(round_to_nearest(w_OI, on).dequantized() - w_OI, known.gram_II)
    assert chosen.exponent in EXPONENTS
    assert chosen.error < 0.8 * rounded


def test_scales_of_one_are_kept_where_none_are_better() -> None:
    chosen = search_scales(torch.zeros(4, 32), statistics(torch.randn(8, 32)), grid=grid(), possible=lambda s_I: s_I)
    assert chosen.exponent == 0
    assert bool((chosen.scales_I == 1).all())


def test_of_several_ranges_the_one_of_least_output_error_is_taken() -> None:
    w_OI = torch.tensor([[7.5, 0.5, *([0.0] * 30)]])
    gram_II = torch.diag(torch.tensor([0.0, 1.0, *([0.0] * 30)]))
    wide, narrow = fit_grid(w_OI, grid()), (torch.full((1, 1), 0.5), None)
    assert best_rounding(w_OI, gram_II, grid=grid(), ranges=[wide, narrow]).scales_OG.item() == 0.5


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("heads", [2, 4])
def test_scaling_leaves_the_function_as_it_was(model_type: str, heads: int) -> None:
    layer = make_layer(model_type, num_key_value_heads=heads)
    outcome = quantize_layer(copy.deepcopy(layer), recipe(group_size=32))
    assert any(exponent > 0 for exponent in outcome.details.values())
    assert relative_change(layer, {**outcome.changed, **outcome.rescaled}) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scaled_norms_keep_their_values_in_a_16_bit_base(dtype: torch.dtype) -> None:
    layer = make_layer(dtype=dtype)
    outcome = quantize_layer(copy.deepcopy(layer), recipe(group_size=32))
    assert set(outcome.changed) == {"input_layernorm.weight", "post_attention_layernorm.weight"}
    for tensor in outcome.changed.values():
        assert torch.equal(tensor.to(dtype).float(), tensor)


def test_grouped_queries_leave_their_output_projection_unscaled() -> None:
    grouped, full = scalable_channels(make_layer()), scalable_channels(make_layer(**FULL_HEADS))
    assert set(full) - set(grouped) == {"self_attn.o_proj"}
    assert quantize_layer(make_layer(), recipe(group_size=32)).details["awq exponent of self_attn.o_proj"] == 0


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_channels_of_linear_layers_move_without_changing_the_function(model_type: str) -> None:
    layer = make_layer(model_type, **FULL_HEADS)
    for first in ("self_attn.o_proj", "mlp.down_proj"):
        work = copy.deepcopy(layer)
        channels = scalable_channels(work)[first]
        asked_I = torch.rand(work.linears[first].in_features, generator=torch.Generator().manual_seed(1)) + 0.1
        names = move_scales(work, channels, possible_scales(work, channels, asked_I))
        assert f"{first}.weight" in names
        assert relative_change(layer, tensors_of(work, names)) <= 1e-6


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("clip_search", [True, False])
def test_every_group_is_at_least_as_near_to_its_output_as_rounding(symmetric: bool, clip_search: bool) -> None:
    layer = make_layer("qwen2", grid=grid(symmetric=symmetric), **FULL_HEADS)
    work = copy.deepcopy(layer)
    outcome = quantize_layer(work, recipe(group_size=32, symmetric=symmetric, clip_search=clip_search))
    scaled = input_statistics(with_tensors(layer, {**outcome.changed, **outcome.rescaled}))
    for group, known in input_statistics(layer).items():
        plain = round_to_nearest(stacked_weights(layer, group), layer.grid).dequantized()
        before = output_error(plain - stacked_weights(layer, group), known.gram_II)
        weights = [weight for name, weight in outcome.weights.items() if name in _group(layer, group)]
        chosen = torch.cat([weight.dequantized() for weight in weights])
        after = output_error(chosen - stacked_weights(work, group), scaled[group].gram_II)
        assert after <= before * (1 + 1e-4)


def test_the_layer_comes_nearer_to_its_output_than_by_rounding() -> None:
    layer = make_layer()
    rounded = {f"{n}.weight": round_to_nearest(m.weight, layer.grid).dequantized() for n, m in layer.linears.items()}
    outcome = quantize_layer(copy.deepcopy(layer), recipe(group_size=32))
    assert relative_change(layer, stored(outcome)) < 0.9 * relative_change(layer, rounded)


def test_a_linear_layer_that_is_no_target_is_scaled_with_those_that_read_the_same_input() -> None:
    layer = make_layer(targets=("self_attn.q_proj", "mlp.down_proj"))
    outcome = quantize_layer(copy.deepcopy(layer), recipe(group_size=32))
    assert set(outcome.weights) == {"self_attn.q_proj", "mlp.down_proj"}
    assert {"self_attn.k_proj.weight", "self_attn.v_proj.weight"} <= set(outcome.changed)
    assert "self_attn.q_proj.weight" in outcome.rescaled
    assert relative_change(layer, {**outcome.changed, **outcome.rescaled}) <= 1e-5


def test_equal_layers_give_equal_codes() -> None:
    first, second = (quantize_layer(make_layer("qwen3"), recipe(group_size=32)) for _ in range(2))
    for name, weight in first.weights.items():
        assert torch.equal(weight.codes_OI, second.weights[name].codes_OI)
        assert torch.equal(stored(first)[f"{name}.weight"], stored(second)[f"{name}.weight"])


def test_a_layer_whose_inputs_are_zero_is_rounded() -> None:
    layer = make_layer()
    layer.inputs.hidden_NTH.zero_()
    outcome = quantize_layer(layer, recipe(group_size=32, clip_search=False))
    assert all(math.isfinite(value) for value in outcome.details.values())
    assert torch.isfinite(output(with_tensors(layer, stored(outcome)))).all()


def _group(layer: LayerWork, first: str) -> tuple[str, ...]:
    return next(group.linears for group in layer.groups if group.linears[0] == first)
