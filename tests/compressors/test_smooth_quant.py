"""SmoothQuant moves outliers of the activations into the weights without changing the function."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from compressors.layer_algorithms import LayerWork
from compressors.layer_channels import Look, look_at_inputs
from compressors.smooth_quant import smooth_layer, smoothing_scales
from modelpress.quantization_recipes import QuantizeWeights
from tests.compressors.layer_works import make_layer, relative_change, with_tensors

NORMED = ("self_attn.q_proj", "mlp.gate_proj")


def recipe(strength: float | None) -> QuantizeWeights:
    return QuantizeWeights(algorithm="rtn", scheme="w8a8", group_size=None, smooth_quant=strength)


def test_the_scales_share_each_range_between_inputs_and_weights() -> None:
    scales_I = smoothing_scales(torch.tensor([16.0, 1.0, 4.0]), torch.tensor([1.0, 4.0, 1.0]), strength=0.5)
    assert scales_I.tolist() == [4.0, 0.5, 2.0]


def test_a_channel_without_inputs_or_without_weights_stays() -> None:
    assert smoothing_scales(torch.tensor([0.0, 9.0]), torch.tensor([4.0, 0.0]), strength=0.5).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_smoothing_leaves_the_function_as_it_was(model_type: str, strength: float) -> None:
    layer = make_layer(model_type)
    changed = smooth_layer(copy.deepcopy(layer), recipe(strength))
    assert {"input_layernorm.weight", "post_attention_layernorm.weight"} < set(changed)
    assert relative_change(layer, dict(changed)) <= 1e-5


def test_the_layer_given_is_smoothed_itself() -> None:
    layer = make_layer()
    for name, tensor in smooth_layer(layer, recipe(0.5)).items():
        assert torch.equal(layer.module.get_parameter(name), tensor)


def test_inputs_and_weights_have_equal_ranges_afterwards_at_one_half() -> None:
    layer = make_layer()
    smoothed = with_tensors(layer, dict(smooth_layer(copy.deepcopy(layer), recipe(0.5))))
    weights = torch.cat([smoothed.linears[name].weight for name in smoothed.groups[0].linears])
    ratios_I = largest_inputs(smoothed)["self_attn.q_proj"] / weights.abs().amax(dim=0)
    assert torch.allclose(ratios_I, torch.ones_like(ratios_I), rtol=0.02)


def test_outliers_of_the_inputs_shrink() -> None:
    layer = make_layer()
    before = largest_inputs(layer)
    after = largest_inputs(with_tensors(layer, dict(smooth_layer(copy.deepcopy(layer), recipe(0.5)))))
    for name in NORMED:
        assert after[name].max() / after[name].median() < 0.7 * before[name].max() / before[name].median()


def test_nothing_changes_unless_the_recipe_asks_for_it() -> None:
    assert smooth_layer(make_layer(), recipe(None)) == {}


def largest_inputs(layer: LayerWork) -> dict[str, Tensor]:
    found = {name: torch.zeros(layer.linears[name].in_features) for name in NORMED}

    def looker(name: str) -> Look:
        return lambda x_NI: found.update({name: torch.maximum(found[name], x_NI.abs().amax(dim=0))})

    look_at_inputs(layer, {name: looker(name) for name in NORMED})
    return found
