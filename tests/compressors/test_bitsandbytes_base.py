"""What bitsandbytes quantized is read by its format: values worked out by hand, and by the library where it is."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compressors.bitsandbytes_base import dequantize, quantized_weights, read_quantized
from compressors.bitsandbytes_codes import CODES
from modelpress.errors import InvalidModel

NAME = "layers.0.up.weight"
SHAPES = ((3, 23), (1, 1), (8, 64), (5, 1, 33))


@pytest.fixture
def bitsandbytes() -> Iterator[ModuleType]:
    """The library, where it is installed; it is no dependency of the service."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pytest.importorskip("bitsandbytes", reason="bitsandbytes is the reference of this test")


def state_of(shape: tuple[int, ...], scheme: str = "nf4", **fields: object) -> dict[str, object]:
    return {"quant_type": scheme, "blocksize": 32, "dtype": "bfloat16", "shape": list(shape), **fields}


def as_bytes(state: object) -> Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def stored_tensors(shape: tuple[int, ...], scheme: str, *, nested: bool, seed: int = 0) -> dict[str, Tensor]:
    """A weight as it is stored, of random codes and scales."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape)
    blocks = math.ceil(count / 32)
    tensors = {
        NAME: torch.randint(0, 256, (math.ceil(count / 2), 1), generator=generator, dtype=torch.uint8),
        f"{NAME}.quant_map": torch.tensor(CODES[scheme]),
        f"{NAME}.absmax": torch.rand(blocks, generator=generator),
    }
    fields: dict[str, object] = {}
    if nested:
        fields = {"nested_blocksize": 64, "nested_dtype": "float32", "nested_offset": 0.25}
        tensors[f"{NAME}.absmax"] = torch.randint(0, 256, (blocks,), generator=generator, dtype=torch.uint8)
        tensors[f"{NAME}.nested_absmax"] = torch.rand(math.ceil(blocks / 64), generator=generator)
        tensors[f"{NAME}.nested_quant_map"] = torch.linspace(-1, 1, 256)
    tensors[f"{NAME}.quant_state.bitsandbytes__{scheme}"] = as_bytes(state_of(shape, scheme, **fields))
    return tensors


def read(tensors: dict[str, Tensor], name: str = NAME) -> Tensor:
    quantized = quantized_weights(tensors)[name]
    weight = read_quantized(quantized, tensors.__getitem__)
    values = dequantize(weight, {part: tensors[stored] for part, stored in quantized.parts.items()})
    assert values.shape == weight.shape
    assert values.dtype == torch.float32
    return values


def by_hand(tensors: dict[str, Tensor], shape: tuple[int, ...], *, nested: bool) -> Tensor:
    """Value by value, in Python's floats: code of the nibble (high one first) times the scale of its block of 32."""
    codes = tensors[f"{NAME}.quant_map"].tolist()
    values = []
    for index in range(math.prod(shape)):
        byte = int(tensors[NAME][index // 2, 0])
        scale = tensors[f"{NAME}.absmax"][index // 32].item()
        if nested:
            outer = tensors[f"{NAME}.nested_absmax"][index // 32 // 64].item()
            scale = tensors[f"{NAME}.nested_quant_map"][int(scale)].item() * outer + 0.25
        values.append(codes[byte % 16 if index % 2 else byte // 16] * scale)
    return torch.tensor(values).reshape(shape)


@pytest.mark.parametrize("shape", [*SHAPES, (70, 64)])
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("scheme", ["nf4", "fp4"])
def test_a_value_is_its_code_times_the_scale_of_its_block(scheme: str, nested: bool, shape: tuple[int, ...]) -> None:
    tensors = stored_tensors(shape, scheme, nested=nested)
    torch.testing.assert_close(read(tensors), by_hand(tensors, shape, nested=nested), rtol=1e-6, atol=1e-7)


def test_values_that_bitsandbytes_0_50_2_gave_are_given() -> None:
    """Its dequantize_4bit on what its quantize_4bit made of 69 normal numbers, FP4 plain and NF4 nested."""
    packed = {
        "fp4": "ddee44eb6a66125eaa747ae34f96225cf1e6617694e163daf441e3e62223d5946db1d0",
        "nf4": "2265cb5092998dd611aba15fb468eec3475898a97b67af214bc86f59deef3c6ba20727",
    }
    fp4 = {
        NAME: torch.tensor(list(bytes.fromhex(packed["fp4"])), dtype=torch.uint8).unsqueeze(1),
        f"{NAME}.quant_map": torch.tensor(CODES["fp4"]),
        f"{NAME}.absmax": torch.tensor([0.2115219384431839, 0.2567232847213745, 0.1599082052707672]),
        f"{NAME}.quant_state.bitsandbytes__fp4": as_bytes(state_of((3, 23), "fp4")),
    }
    nested_map = torch.zeros(256)
    nested_map[[0, 170, 251]] = torch.tensor([-0.992968738079071, 0.04234374687075615, 0.9507812261581421])
    nested = {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.209384486079216}
    nf4 = {
        NAME: torch.tensor(list(bytes.fromhex(packed["nf4"])), dtype=torch.uint8).unsqueeze(1),
        f"{NAME}.quant_map": torch.tensor(CODES["nf4"]),
        f"{NAME}.absmax": torch.tensor([170, 251, 0], dtype=torch.uint8),
        f"{NAME}.nested_absmax": torch.tensor([0.04947628080844879]),
        f"{NAME}.nested_quant_map": nested_map,
        f"{NAME}.quant_state.bitsandbytes__nf4": as_bytes(state_of((3, 23), "nf4", **nested)),
    }
    at = [0, 31, 32, 63, 64, 67, 68]
    fp4_values = [-0.10576096922159195, -0.07050731778144836, -0.06418082118034363, 0.0855744332075119]
    fp4_values += [0.02665136754512787, 0.0008328552357852459, -0.0799541026353836]
    nf4_values = [-0.11104218661785126, -0.08351695537567139, -0.07293805480003357, 0.08665012568235397]
    nf4_values += [0.03944099321961403, 0.0, -0.08414614945650101]
    assert read(fp4).flatten()[at].tolist() == fp4_values
    assert read(nf4).flatten()[at].tolist() == nf4_values
    assert read(fp4).double().square().sum().item() == pytest.approx(0.7793759958800883, rel=1e-12)
    assert read(nf4).double().square().sum().item() == pytest.approx(0.7925912484364864, rel=1e-12)


def test_an_8_bit_weight_is_its_codes_times_the_largest_value_of_the_row_over_127() -> None:
    codes = torch.tensor([[127, -127, 0, 1], [64, -1, 3, -128]], dtype=torch.int8)
    scales = torch.tensor([12.7, 0.5])
    tensors = {"up.weight": codes, "up.SCB": scales, "up.weight_format": torch.tensor(0, dtype=torch.uint8)}
    quantized = quantized_weights(tensors)["up.weight"]
    assert quantized.helpers == ("up.SCB", "up.weight_format")
    assert read_quantized(quantized, tensors.__getitem__).dtype is None
    expected = codes.double() * scales.double().unsqueeze(1) / 127
    torch.testing.assert_close(read(tensors, "up.weight"), expected.float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("scheme", ["nf4", "fp4"])
def test_4_bit_values_are_those_of_the_library(
    scheme: str, nested: bool, shape: tuple[int, ...], bitsandbytes: ModuleType
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    storages = (torch.uint8, torch.bfloat16) if weight.numel() % 4 == 0 else (torch.uint8,)
    for dtype, storage in product((torch.float32, torch.bfloat16), storages):
        packed, state = bitsandbytes.functional.quantize_4bit(
            weight.to(dtype), blocksize=64, quant_type=scheme, compress_statistics=nested, quant_storage=storage
        )
        tensors = {NAME: packed, **{f"{NAME}.{part}": t for part, t in state.as_dict(packed=True).items()}}
        expected = bitsandbytes.functional.dequantize_4bit(packed, state)
        assert torch.equal(read(tensors).to(dtype), expected)


@pytest.mark.parametrize("shape", [(16, 16), (24, 16), (16, 160)])
@pytest.mark.parametrize(("scheme", "half_step"), [("nf4", 0.153), ("fp4", 0.167)])
def test_where_a_row_is_no_whole_number_of_blocks_each_value_is_within_half_a_step_of_the_original(
    scheme: str, half_step: float, shape: tuple[int, ...], bitsandbytes: ModuleType
) -> None:
    """There bitsandbytes 0.50.2 dequantizes wrongly on CPUs, to values several steps off, and is no reference."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    packed, state = bitsandbytes.functional.quantize_4bit(weight, blocksize=64, quant_type=scheme)
    tensors = {NAME: packed, **{f"{NAME}.{part}": t for part, t in state.as_dict(packed=True).items()}}
    steps = (read(tensors) - weight).abs().view(-1, 64) / weight.abs().view(-1, 64).amax(1, keepdim=True)
    assert steps.max() <= half_step


def test_8_bit_values_are_those_of_the_library(bitsandbytes: ModuleType) -> None:
    weight = torch.randn(7, 33, generator=torch.Generator().manual_seed(5))
    codes, scales, _ = bitsandbytes.functional.int8_vectorwise_quant(weight.half())
    expected = bitsandbytes.functional.int8_vectorwise_dequant(codes, scales)
    torch.testing.assert_close(
        read({"up.weight": codes, "up.SCB": scales}, "up.weight"), expected.float(), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        {"load_in_8bit": True},
    ],
    ids=["nf4", "fp4", "int8"],
)
def test_a_folder_that_transformers_quantized_is_read_weight_by_weight(
    settings: dict[str, Any], tmp_path: Path, bitsandbytes: ModuleType
) -> None:
    from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "full")
    model = LlamaForCausalLM.from_pretrained(
        tmp_path / "full", quantization_config=BitsAndBytesConfig(**settings), device_map="cpu"
    )
    model.save_pretrained(tmp_path / "quantized")
    tensors = load_file(tmp_path / "quantized/model.safetensors")
    full = load_file(tmp_path / "full/model.safetensors")
    quantized = quantized_weights(tensors)
    assert len(quantized) == 7
    assert tensors.keys() - {helper for weight in quantized.values() for helper in weight.helpers} == full.keys()
    for name in quantized:
        module = model.get_submodule(name.removesuffix(".weight"))
        values = read(tensors, name)
        assert values.shape == full[name].shape
        if "load_in_4bit" in settings:
            expected = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            assert read_quantized(quantized[name], tensors.__getitem__).dtype == torch.bfloat16
            assert torch.equal(values.to(torch.bfloat16), expected)
        else:
            torch.testing.assert_close(values, full[name].float(), rtol=0, atol=float(full[name].abs().max()) / 250)


def test_what_is_not_quantized_is_left_alone() -> None:
    tensors = {
        "norm.weight": torch.ones(3),
        "position_ids": torch.arange(3),
        **stored_tensors((2, 2), "nf4", nested=True),
    }
    found = quantized_weights(tensors)
    assert list(found) == [NAME]
    assert set(found[NAME].helpers) == tensors.keys() - {NAME, "norm.weight", "position_ids"}


STATE = f"{NAME}.quant_state.bitsandbytes__nf4"
NESTED = {"nested_blocksize": 64, "nested_dtype": "float32", "nested_offset": 0.25}


@pytest.mark.parametrize(
    ("change", "mentions"),
    [
        ({f"{NAME}.absmax": None}, [f"'{NAME}'", f"{NAME}.absmax"]),
        ({STATE: None}, [f"'{NAME}'", "quant_state.bitsandbytes__nf4"]),
        ({f"{NAME}.nested_quant_map": None}, [f"{NAME}.nested_quant_map"]),
        (
            {name: None for name in stored_tensors((3, 23), "nf4", nested=True) if name != NAME},
            ["quant_state", "absmax"],
        ),
        ({NAME: None}, [f"'{NAME}'", "belongs to"]),
        ({f"{NAME}.quant_state.bitsandbytes__fp4": as_bytes({})}, ["nf4", "fp4"]),
        ({"head.weight": torch.zeros(2, 2, dtype=torch.int8)}, ["'head.weight'", "head.SCB"]),
        ({STATE: as_bytes([1])}, [STATE, "list"]),
        ({STATE: torch.tensor([123, 255], dtype=torch.uint8)}, [STATE, "UTF-8"]),
        ({STATE: torch.zeros(5000, dtype=torch.uint8)}, [STATE, "[5000]", "4096"]),
        ({STATE: as_bytes(state_of((3, 23)))}, [STATE, "nested_blocksize"]),
        ({STATE: as_bytes(state_of((3, 23), **NESTED, packing="cpu"))}, [STATE, "packing"]),
        ({STATE: as_bytes(state_of((3, 23), **NESTED) | {"quant_type": "fp4"})}, [STATE, "'fp4'", "'nf4'"]),
        ({STATE: as_bytes(state_of((3, 23), **NESTED) | {"blocksize": 48})}, [STATE, "blocksize", "48"]),
        ({STATE: as_bytes(state_of((3, 23), **NESTED) | {"blocksize": True})}, [STATE, "blocksize"]),
        ({STATE: as_bytes(state_of((3, 23), **NESTED) | {"dtype": "save"})}, [STATE, "dtype", "save"]),
        ({STATE: as_bytes(state_of((3, -23), **NESTED))}, [STATE, "shape", "-23"]),
        ({STATE: as_bytes(state_of((4, 23), **NESTED))}, [f"'{NAME}'", "[35, 1]", "[46, 1]"]),
        ({f"{NAME}.absmax": torch.zeros(4, dtype=torch.uint8)}, [f"{NAME}.absmax", "[4]", "[3]"]),
        ({f"{NAME}.absmax": torch.zeros(3)}, [f"{NAME}.absmax", "float32", "uint8"]),
        ({f"{NAME}.nested_absmax": torch.full((1,), torch.inf)}, [f"{NAME}.nested_absmax", "infinite"]),
        ({f"{NAME}.quant_map": torch.zeros(16)}, [f"{NAME}.quant_map", "nf4"]),
    ],
)
def test_a_weight_with_a_part_missing_or_wrong_is_refused_by_the_tensors_name(
    change: dict[str, Tensor | None], mentions: list[str]
) -> None:
    changed: dict[str, Tensor | None] = {**stored_tensors((3, 23), "nf4", nested=True), **change}
    tensors = {name: tensor for name, tensor in changed.items() if tensor is not None}
    with pytest.raises(InvalidModel) as refused:
        read(tensors)
    assert [mention for mention in mentions if mention not in refused.value.message] == []
    assert "full-precision base" in refused.value.message


@pytest.mark.parametrize(
    ("change", "mentions"),
    [
        ({"up.SCB": torch.ones(3)}, ["up.SCB", "[3]", "[2]"]),
        ({"up.weight_format": torch.tensor(1, dtype=torch.uint8)}, ["up.weight_format", "expected 0"]),
        ({"up.weight": torch.ones(2, 2, 2, dtype=torch.int8)}, ["up.weight", "[2, 2, 2]"]),
    ],
)
def test_an_8_bit_weight_in_another_layout_is_refused(change: dict[str, Tensor], mentions: list[str]) -> None:
    tensors = {"up.weight": torch.ones(2, 4, dtype=torch.int8), "up.SCB": torch.ones(2)} | change
    with pytest.raises(InvalidModel) as refused:
        read(tensors, "up.weight")
    assert [mention for mention in mentions if mention not in refused.value.message] == []
