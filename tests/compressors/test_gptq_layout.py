"""GPTQ's layout, unpacked here field by field from its definition, and exact round trips."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from compressors import gptq_layout
from compressors.integer_grid import IntegerGrid, QuantizedWeight, round_to_nearest
from modelpress.errors import InvalidModel
from tests.compressors.gptq_reading import read_gptq_weight
from tests.compressors.stored_models import Tensors

MODULE = "model.layers.0.mlp.up_proj"
GRIDS = [
    IntegerGrid(bits, symmetric, size, torch.float16)
    for bits, symmetric, size in itertools.product((4, 8), (True, False), (32, 64, None))
]


def quantized(grid: IntegerGrid, shape: tuple[int, int] = (16, 128), *, seed: int = 0) -> QuantizedWeight:
    w_OI = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    w_OI[0] = 0
    w_OI[1] = w_OI[1].abs()  # its lowest value is 0: the zero point that format `gptq` cannot hold
    return round_to_nearest(w_OI, grid)


def config(grid: IntegerGrid) -> dict[str, Any]:
    return gptq_layout.quantization_config(grid, ignored=("lm_head",))


def field(word: int, place: int, bits: int) -> int:
    return (word >> (bits * place)) & ((1 << bits) - 1)


def by_hand(tensors: Tensors, value: dict[str, Any]) -> Tensor:
    """(q - zero) * scale, value by value: AutoGPTQ's `QuantLinear`, zeros one more than stored in v1."""
    bits, add = value["bits"], {"gptq": 1, "gptq_v2": 0}[value["checkpoint_format"]]
    words, zeros, scales, groups = (
        tensors[f"{MODULE}.{part}"].tolist() for part in ("qweight", "qzeros", "scales", "g_idx")
    )
    per_word = 32 // bits
    return torch.tensor(
        [
            [
                (
                    field(words[i // per_word][o], i % per_word, bits)
                    - (field(zeros[groups[i]][o // per_word], o % per_word, bits) + add)
                )
                * scales[groups[i]][o]
                for i in range(len(groups))
            ]
            for o in range(len(scales[0]))
        ]
    ).half()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_values_by_the_formats_definition_are_those_of_the_weight(grid: IntegerGrid) -> None:
    weight = quantized(grid)
    tensors = gptq_layout.stored_tensors(MODULE, weight)

    assert torch.equal(by_hand(tensors, config(grid)), weight.dequantized(torch.float16))


@pytest.mark.parametrize("shape", [(16, 128), (8, 256), (40, 64)], ids=str)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_what_is_stored_is_read_again(grid: IntegerGrid, seed: int, shape: tuple[int, int]) -> None:
    weight = quantized(grid, shape, seed=seed)
    tensors = gptq_layout.stored_tensors(MODULE, weight)

    again = read_gptq_weight(MODULE, tensors, quantization=config(grid))

    assert again.grid == grid
    assert torch.equal(again.codes_OI, weight.codes_OI)
    assert torch.equal(again.scales_OG, weight.scales_OG)
    assert torch.equal(again.dequantized(), weight.dequantized())
    stored = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    assert stored == gptq_layout.stored_shapes(MODULE, shape, grid)


def test_asymmetric_weights_are_v2_because_v1_has_no_zero_point_0() -> None:
    symmetric, asymmetric = GRIDS[0], GRIDS[3]
    assert (symmetric.symmetric, asymmetric.symmetric) == (True, False)
    assert config(symmetric)["checkpoint_format"] == "gptq"
    assert config(asymmetric)["checkpoint_format"] == "gptq_v2"
    zeros = quantized(asymmetric).zeros_OG
    assert zeros is not None and int(zeros.min()) == asymmetric.lowest


def test_the_config_names_what_stays_float_as_readers_skip_it() -> None:
    grid = IntegerGrid(8, True, None, torch.float16)
    value = gptq_layout.quantization_config(grid, ignored=("lm_head", "model.layers.1.mlp.up_proj"))

    assert (value["bits"], value["group_size"], value["sym"], value["desc_act"]) == (8, -1, True, False)
    assert value["dynamic"] == {r"-:^lm_head$": {}, r"-:^model\.layers\.1\.mlp\.up_proj$": {}}
    assert (value["quant_method"], value["lm_head"]) == ("gptq", False)


def test_transformers_reads_the_config() -> None:
    from transformers import GPTQConfig

    read = GPTQConfig.from_dict(config(GRIDS[0]))

    assert (read.bits, read.group_size, read.sym, read.desc_act, read.format) == (4, 32, True, False, "gptq")


@pytest.mark.parametrize(("shape", "dtype"), [((12, 64), torch.float16), ((16, 64), torch.bfloat16)])
def test_what_the_format_cannot_hold_is_refused(shape: tuple[int, int], dtype: torch.dtype) -> None:
    with pytest.raises(InvalidModel, match=MODULE) as caught:
        gptq_layout.stored_shapes(MODULE, shape, IntegerGrid(4, True, 32, dtype))
    assert caught.value.field == MODULE
