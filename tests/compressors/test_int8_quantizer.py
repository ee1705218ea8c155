from pathlib import Path

import pytest
import torch
from torch.fx import GraphModule

from compressors.folders import load_model
from compressors.graph_capture import capture, example_inputs
from compressors.int8_quantizer import (
    ACTIVATION_CODE_MAX,
    BIAS_CODE_MAX,
    WEIGHT_CODE_MAX,
    bias_codes,
    convert,
    linear_nodes,
    load_ranges,
    observe,
    prepare,
    ranges,
    sites,
)
from compressors.parity_reference import exact_sums
from modelpress.errors import InvalidModel

QUERY, POOLER = "bert.encoder.layer.0.attention.self.query", "bert.pooler.dense"


def inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 40, (4, 7), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 3:] = 0
    return ids, mask, torch.zeros_like(ids)


def linears(model: torch.nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]


def calibrated(folder: Path, **weights: torch.Tensor) -> GraphModule:
    model = load_model(folder)
    with torch.no_grad():
        for name, value in weights.items():
            model.get_submodule(QUERY).get_parameter(name).copy_(value)
    graph = prepare(capture(model), modules=linears(model))
    observe(graph, [inputs(seed) for seed in range(3)])
    return graph


def test_the_prepared_graph_computes_what_the_converted_one_does(bert: Path) -> None:
    graph = calibrated(bert)
    with torch.no_grad():
        prepared = graph(*inputs(9))
        converted = convert(graph)(*inputs(9))
    torch.testing.assert_close(prepared, converted, rtol=0, atol=1e-6)


def test_no_pair_of_products_leaves_16_bits(bert: Path) -> None:
    assert 2 * ACTIVATION_CODE_MAX * WEIGHT_CODE_MAX < 2**15
    converted = convert(calibrated(bert))
    for node in linear_nodes(converted):
        codes = getattr(converted, node.args[1].args[0].target)
        assert codes.dtype == torch.int8 and codes.abs().max() == WEIGHT_CODE_MAX


def test_ranges_rebuild_the_very_same_graph(bert: Path) -> None:
    graph = calibrated(bert)
    model = load_model(bert)
    again = prepare(capture(model), modules=linears(model))
    load_ranges(again, ranges(graph))
    with torch.no_grad():
        assert torch.equal(graph(*inputs(9)), again(*inputs(9)))


def test_ranges_of_another_model_are_refused_by_name(bert: Path) -> None:
    graph = calibrated(bert)
    state = ranges(graph)
    del state[f"{POOLER}.input_max"]
    with pytest.raises(InvalidModel, match=f"{POOLER}.input_max"):
        load_ranges(graph, state)


def test_layers_that_are_not_named_stay_float(bert: Path) -> None:
    graph = prepare(capture(load_model(bert)), modules=[POOLER])
    assert [site.module for site in sites(graph)] == [POOLER]


@pytest.mark.parametrize("weight", [0.0, 1e-40])
def test_dead_channels_keep_their_bias_and_finite_scales(bert: Path, weight: float) -> None:
    graph = calibrated(bert, weight=torch.full((16, 16), weight), bias=torch.full((16,), 0.7))
    site = next(site for site in sites(graph) if site.module == QUERY)
    codes = bias_codes(site.bias, site.input.scale * site.weight.scale)
    assert torch.isfinite(site.weight.scale).all() and codes.abs().max() <= BIAS_CODE_MAX + 1
    torch.testing.assert_close(site.bias.detach(), torch.full((16,), 0.7))
    with torch.no_grad():
        assert torch.isfinite(convert(graph)(*inputs())).all()


def test_an_input_that_is_not_finite_is_refused_by_layer(bert: Path) -> None:
    with pytest.raises(InvalidModel, match="not finite on the calibration data"):
        calibrated(bert, bias=torch.full((16,), float("nan")))


def test_bias_codes_are_stable_on_their_own_grid() -> None:
    scale_O = torch.tensor([1e-4, 3e-7])
    codes_O = bias_codes(torch.tensor([0.70004, -0.1]), scale_O)
    assert codes_O.tolist() == [7000, -333333]
    assert torch.equal(bias_codes(codes_O.float() * scale_O, scale_O), codes_O)


def test_dropout_stays_off_whatever_mode_the_graph_is_in(bert: Path) -> None:
    graph = calibrated(bert)
    with torch.no_grad():
        torch.nn.Module.train(graph, False)
        evaluated = graph(*inputs())
        torch.nn.Module.train(graph, True)
        assert torch.equal(evaluated, graph(*inputs()))


def test_exact_sums_differ_from_fp32_sums_by_rounding_only(bert: Path) -> None:
    converted = convert(calibrated(bert))
    with torch.no_grad():
        torch.testing.assert_close(converted(*inputs()), exact_sums(converted)(*inputs()), rtol=0, atol=2e-2)


def test_batch_and_length_are_free_in_the_captured_graph(bert: Path) -> None:
    model = load_model(bert)
    graph = capture(model)
    ids, mask, types = inputs()
    with torch.no_grad():
        for part in (slice(0, 1), slice(0, 4)):
            expected = model(ids[part, :5], attention_mask=mask[part, :5], token_type_ids=types[part, :5]).logits
            torch.testing.assert_close(graph(ids[part, :5], mask[part, :5], types[part, :5]), expected)


def test_every_example_input_is_an_object_of_its_own(bert: Path) -> None:
    values = list(example_inputs(load_model(bert).config).values())
    assert len({value.data_ptr() for value in values}) == len(values) == 3
