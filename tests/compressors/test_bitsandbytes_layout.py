"""bitsandbytes' layout: exact round trips, and the library's own codes, scales, state and values where it is."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from compressors import bitsandbytes_layout
from compressors.codebook_grid import CodebookGrid, round_to_codebook
from modelpress.errors import InvalidModel
from tests.compressors.quantized_decoders import arguments_of
from tests.compressors.stored_models import Tensors, same

MODULE = "model.layers.0.mlp.up_proj"
NAME = f"{MODULE}.weight"
STATE = f"{NAME}.quant_state.bitsandbytes__nf4"


@pytest.fixture
def functional() -> Iterator[ModuleType]:
    """The library's functions, where it is installed; it is no dependency of the service."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pytest.importorskip("bitsandbytes", reason="bitsandbytes is the reference of this test").functional


def drawn(seed: int, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    w_OI = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    w_OI[0] = 0
    return w_OI.to(dtype)


def stored(seed: int = 0, shape: tuple[int, int] = (6, 128), scheme: str = "nf4", group_size: int = 32) -> Tensors:
    weight = round_to_codebook(drawn(seed, shape), CodebookGrid(scheme, group_size))
    return bitsandbytes_layout.stored_tensors(MODULE, weight, dtype=torch.bfloat16)


def config(scheme: str = "nf4", group_size: int = 32) -> dict[str, object]:
    arguments = arguments_of(scheme=scheme, group_size=group_size)
    return bitsandbytes_layout.quantization_config(arguments, dtype=torch.bfloat16, ignored=("lm_head",))


@pytest.mark.parametrize("shape", [(6, 128), (1, 256), (7, 384)])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("scheme", ["nf4", "fp4"])
def test_what_is_stored_is_read_again(scheme: str, group_size: int, shape: tuple[int, int]) -> None:
    weight = round_to_codebook(drawn(group_size, shape), CodebookGrid(scheme, group_size))
    tensors = bitsandbytes_layout.stored_tensors(MODULE, weight, dtype=torch.bfloat16)

    again = bitsandbytes_layout.read_weight(MODULE, tensors.__getitem__, quantization=config(scheme, group_size))

    assert again.grid == weight.grid
    assert torch.equal(again.codes_OI, weight.codes_OI)
    assert torch.equal(again.absmax_OG, weight.absmax_OG)
    assert torch.equal(again.dequantized(), weight.dequantized())


def test_two_codes_share_a_byte_the_first_in_its_high_half() -> None:
    codes_OI = torch.tensor([[1, 2, 15, 0]]).to(torch.uint8)

    packed = bitsandbytes_layout.pack_pairs(codes_OI)

    assert packed.tolist() == [[0x12], [0xF0]]
    assert torch.equal(bitsandbytes_layout.unpack_pairs(packed, (1, 4)), codes_OI)


def test_the_state_says_what_the_codes_stand_for() -> None:
    tensors = stored()

    state = json.loads(bytes(tensors[STATE].tolist()))

    assert state == {"quant_type": "nf4", "blocksize": 32, "dtype": "bfloat16", "shape": [6, 128]}
    assert (tensors[NAME].shape, tensors[f"{NAME}.absmax"].shape) == ((6 * 64, 1), (6 * 4,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("scheme", ["nf4", "fp4"])
def test_codes_scales_and_state_are_those_of_bitsandbytes(
    functional: ModuleType, scheme: str, group_size: int, dtype: torch.dtype
) -> None:
    w_OI = drawn(group_size, (24, 256), dtype)

    packed, state = functional.quantize_4bit(w_OI, blocksize=group_size, quant_type=scheme, compress_statistics=False)

    expected = {NAME: packed} | {f"{NAME}.{part}": value for part, value in state.as_dict(packed=True).items()}
    weight = round_to_codebook(w_OI, CodebookGrid(scheme, group_size))
    assert same(bitsandbytes_layout.stored_tensors(MODULE, weight, dtype=dtype), expected)
    assert torch.equal(weight.dequantized(dtype), functional.dequantize_4bit(packed, state))


@pytest.mark.parametrize("lost", [(STATE, f"{NAME}.absmax", f"{NAME}.quant_map"), (STATE,), (f"{NAME}.absmax",)])
def test_a_weight_without_its_state_is_refused_by_the_names_of_what_it_lacks(lost: tuple[str, ...]) -> None:
    """Case 36: stripped of them, the codes would be taken for values."""
    tensors = {name: tensor for name, tensor in stored().items() if name not in lost}

    with pytest.raises(InvalidModel) as caught:
        bitsandbytes_layout.read_weight(MODULE, tensors.__getitem__, quantization=config())

    assert all(name in caught.value.message for name in lost)
    assert caught.value.field == NAME


@pytest.mark.parametrize(
    "change",
    [{"quant_method": "gptq"}, {"load_in_4bit": False}, {"bnb_4bit_quant_type": "int4"}, {"bnb_4bit_quant_type": None}],
    ids=str,
)
def test_another_config_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(InvalidModel) as caught:
        bitsandbytes_layout.read_weight(MODULE, stored().__getitem__, quantization=config() | change)
    assert caught.value.field == "quantization_config"


def test_blocks_that_end_inside_another_row_are_refused() -> None:
    tensors = stored(shape=(8, 64))
    state = {"quant_type": "nf4", "blocksize": 32, "dtype": "bfloat16", "shape": [32, 16]}
    tensors[STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    with pytest.raises(InvalidModel, match="blocks of 32 in rows of 16"):
        bitsandbytes_layout.read_weight(MODULE, tensors.__getitem__, quantization=config())


def test_the_config_is_what_transformers_writes() -> None:
    from transformers import BitsAndBytesConfig

    fields = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
    written = BitsAndBytesConfig(**fields, llm_int8_skip_modules=["lm_head"]).to_dict()

    assert config() == written | {"quant_method": str(written["quant_method"].value)}
