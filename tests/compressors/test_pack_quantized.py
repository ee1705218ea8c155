"""compressed-tensors' layouts: exact round trips, and field by field what the package itself writes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from torch import Tensor

from compressors import pack_quantized
from compressors.integer_grid import IntegerGrid, QuantizedWeight, round_to_nearest
from modelpress.errors import InvalidModel
from modelpress.quantization_recipes import QuantizeWeights
from tests.compressors.quantized_decoders import arguments_of
from tests.compressors.stored_models import Tensors, same

MODULE = "model.layers.0.mlp.up_proj"
ARGUMENTS = {
    **{
        f"w4a16 {'sym' if symmetric else 'asym'} g{size}": arguments_of(group_size=size, symmetric=symmetric)
        for symmetric, size in itertools.product((True, False), (32, 64, 128))
    },
    "w8a16 sym": arguments_of(scheme="w8a16"),
    "w8a16 asym": arguments_of(scheme="w8a16", symmetric=False),
    "w8a16 g32": arguments_of(scheme="w8a16", group_size=32),
    "w8a8": arguments_of(scheme="w8a8"),
}
SHAPES = [(8, 128), (3, 256), (21, 128)]


def quantized(arguments: QuantizeWeights, shape: tuple[int, int] = (8, 128), *, seed: int = 0) -> QuantizedWeight:
    w_OI = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    w_OI[0] = 0
    w_OI[1] *= 1e-42
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
    grid = IntegerGrid(arguments.num_bits, arguments.symmetric, arguments.group_size, dtype)
    return round_to_nearest(w_OI, grid)


def config(arguments: QuantizeWeights, grid: IntegerGrid) -> dict[str, Any]:
    return pack_quantized.quantization_config(arguments, grid=grid, ignored=("lm_head",))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_is_stored_is_read_again(name: str, shape: tuple[int, int], seed: int) -> None:
    arguments = ARGUMENTS[name]
    weight = quantized(arguments, shape, seed=seed)
    tensors = pack_quantized.stored_tensors(MODULE, weight, scheme=arguments.scheme)

    again = pack_quantized.read_weight(MODULE, tensors.__getitem__, quantization=config(arguments, weight.grid))

    assert again.grid == weight.grid
    assert torch.equal(again.codes_OI, weight.codes_OI)
    assert torch.equal(again.scales_OG, weight.scales_OG)
    assert (again.zeros_OG is None) == arguments.symmetric
    if weight.zeros_OG is not None:
        assert torch.equal(again.zeros_OG, weight.zeros_OG)


@pytest.mark.parametrize("shape", [(16, 128), (9, 256), (21, 128)], ids=str)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_tensors_and_values_are_those_of_the_package(name: str, shape: tuple[int, int]) -> None:
    arguments = ARGUMENTS[name]
    weight = quantized(arguments, shape)
    scheme = the_scheme(config(arguments, weight.grid))
    state = {"weight": weight.dequantized(), "weight_scale": weight.scales_OG}
    if weight.zeros_OG is not None:
        state["weight_zero_point"] = weight.zeros_OG
    package = BaseCompressor.get_value_from_registry(scheme.format)

    compressed = {f"{MODULE}.{part}": tensor for part, tensor in package.compress(state, scheme).items()}

    ours = pack_quantized.stored_tensors(MODULE, weight, scheme=arguments.scheme)
    assert same(ours, compressed)
    local = {part.removeprefix(f"{MODULE}."): tensor for part, tensor in ours.items()}
    assert torch.equal(package.decompress(local, scheme)["weight"], weight.dequantized(weight.grid.scale_dtype))


def the_scheme(value: dict[str, Any]) -> QuantizationScheme:
    return QuantizationConfig.model_validate(value).config_groups["group_0"]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_config_is_field_by_field_what_the_package_writes(name: str) -> None:
    """`quantization_config` of ModelCompressor.update_config, and no field that the package would leave out."""
    arguments = ARGUMENTS[name]
    grid = quantized(arguments).grid
    ours = config(arguments, grid)
    beside = {"version": "0.20.0", "sparsity_config": {}, "transform_config": {}}

    assert ours == QuantizationConfig.model_validate(ours).model_dump(mode="json") | beside

    weights = ours["config_groups"]["group_0"]["weights"]
    inputs = ours["config_groups"]["group_0"]["input_activations"]
    assert weights["num_bits"] == (4 if arguments.scheme == "w4a16" else 8)
    assert weights["strategy"] == ("channel" if arguments.group_size is None else "group")
    assert (inputs is not None) == (arguments.scheme == "w8a8")
    assert inputs is None or (inputs["strategy"], inputs["dynamic"], inputs["symmetric"]) == ("token", True, True)
    assert (ours["quantization_status"], ours["ignore"]) == ("compressed", ["lm_head"])


@pytest.mark.parametrize("num_bits", [4, 8])
def test_words_hold_codes_lowest_bits_first(num_bits: int) -> None:
    lowest, highest = -(1 << (num_bits - 1)), (1 << (num_bits - 1)) - 1
    codes_RC = torch.tensor([[lowest, highest, 0, lowest + 1, highest, highest, lowest, highest, 1]]).to(torch.int8)
    bits = "".join(f"{code - lowest:0{num_bits}b}" for code in reversed(codes_RC[0].tolist()))

    words_RW = pack_quantized.pack_columns(codes_RC, num_bits)

    unsigned = [word % (1 << 32) for word in words_RW[0].tolist()]
    assert sum(word << (32 * place) for place, word in enumerate(unsigned)) == int(bits, 2)
    assert torch.equal(pack_quantized.unpack_columns(words_RW, num_bits, columns=9), codes_RC)


def test_a_row_of_zeros_stays_exactly_zero_and_a_subnormal_one_finite() -> None:
    """Case 24, for every scheme."""
    for arguments in ARGUMENTS.values():
        weight = quantized(arguments)
        tensors = pack_quantized.stored_tensors(MODULE, weight, scheme=arguments.scheme)
        again = pack_quantized.read_weight(MODULE, tensors.__getitem__, quantization=config(arguments, weight.grid))
        assert torch.count_nonzero(again.dequantized()[0]) == 0
        assert again.dequantized().isfinite().all()


def damaged(tensors: Tensors, part: str, change: Any) -> Tensors:
    name = f"{MODULE}.{part}"
    return {**tensors, name: change(tensors[name])}


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        ("weight_scale", lambda t: torch.full_like(t, torch.nan), "not finite"),
        ("weight_scale", torch.zeros_like, "not finite and positive"),
        ("weight_scale", lambda t: t[:, :1], "weight_scale has shape"),
        ("weight_packed", lambda t: t[:, 1:], "codes of shape"),
        ("weight_packed", lambda t: t.float(), "codes of shape"),
        ("weight_zero_point", lambda t: t[:0], "codes of shape"),
        ("weight_shape", lambda t: t[:1], "no pair of sizes"),
        ("weight_shape", lambda t: torch.tensor([8, 100]), "codes of shape"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(part: str, change: Any, said: str) -> None:
    arguments = ARGUMENTS["w4a16 asym g32"]
    weight = quantized(arguments)
    tensors = damaged(pack_quantized.stored_tensors(MODULE, weight, scheme="w4a16"), part, change)

    with pytest.raises(InvalidModel, match=said) as caught:
        pack_quantized.read_weight(MODULE, tensors.__getitem__, quantization=config(arguments, weight.grid))
    assert caught.value.field == MODULE


@pytest.mark.parametrize(
    "change",
    [{"quant_method": "awq"}, {"format": "nvfp4-pack-quantized"}, {"config_groups": {}}, {"config_groups": None}],
)
def test_another_config_is_refused(change: dict[str, Any]) -> None:
    arguments = ARGUMENTS["w8a16 sym"]
    value: dict[str, Any] = config(arguments, quantized(arguments).grid) | change

    def load(name: str) -> Tensor:
        raise AssertionError(name)

    with pytest.raises(InvalidModel) as caught:
        pack_quantized.read_weight(MODULE, load, quantization=value)
    assert caught.value.field == "quantization_config"
