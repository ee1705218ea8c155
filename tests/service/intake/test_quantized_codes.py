"""Codes of bitsandbytes without what they stand for are refused when they arrive, naming every missing part."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from modelpress.errors import InvalidModel
from modelpress.manifests import ArtifactKind
from tests.service.intake.tiny import Files, Inspect, encode

WEIGHT = "model.layers.0.mlp.up_proj.weight"
STATE = f"{WEIGHT}.quant_state.bitsandbytes__nf4"
PLAIN: dict[str, tuple[str, list[int], int]] = {
    WEIGHT: ("U8", [64, 1], 64),
    f"{WEIGHT}.absmax": ("F32", [2], 8),
    f"{WEIGHT}.quant_map": ("F32", [16], 64),
    STATE: ("U8", [80], 80),
}
NESTED = {f"{WEIGHT}.nested_absmax": ("F32", [1], 4), f"{WEIGHT}.nested_quant_map": ("F32", [256], 1024)}
INT8: dict[str, tuple[str, list[int], int]] = {
    WEIGHT: ("I8", [4, 4], 16),
    WEIGHT.replace("weight", "SCB"): ("F32", [4], 16),
}
FOUR_BIT = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
EIGHT_BIT = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def files(tensors: dict[str, Any], quantization: dict[str, Any] | None) -> Files:
    """A folder of zeros in these dtypes and shapes."""
    header, size = {}, 0
    for name, (dtype, shape, length) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [size, size + length]}
        size += length
    text = json.dumps(header).encode()
    config: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    return {
        "config.json": encode(config | ({"quantization_config": quantization} if quantization else {})),
        "model.safetensors": struct.pack("<Q", len(text)) + text + bytes(size),
    }


def without(tensors: dict[str, Any], *missing: str) -> dict[str, Any]:
    return {name: value for name, value in tensors.items() if name not in missing}


@pytest.mark.parametrize("tensors", [PLAIN, PLAIN | NESTED])
def test_complete_codes_are_taken_in(inspect: Inspect, tensors: dict[str, Any]) -> None:
    assert inspect(ArtifactKind.MODEL, files(tensors, FOUR_BIT))["quantization_type"] == "nf4"


@pytest.mark.parametrize("quantization", [FOUR_BIT, None], ids=["said", "not said"])
@pytest.mark.parametrize(
    ("tensors", "missing"),
    [
        (without(PLAIN, STATE, f"{WEIGHT}.absmax", f"{WEIGHT}.quant_map"), [STATE, f"{WEIGHT}.absmax"]),
        (without(PLAIN, STATE), [STATE]),
        (without(PLAIN, f"{WEIGHT}.absmax"), [f"{WEIGHT}.absmax"]),
        (without(PLAIN | NESTED, f"{WEIGHT}.nested_quant_map"), [f"{WEIGHT}.nested_quant_map"]),
    ],
)
def test_codes_without_a_part_are_refused_with_its_name(
    inspect: Inspect, tensors: dict[str, Any], missing: list[str], quantization: dict[str, Any] | None
) -> None:
    with pytest.raises(InvalidModel) as caught:
        inspect(ArtifactKind.MODEL, files(tensors, quantization))
    assert (caught.value.reason, caught.value.field) == ("STRIPPED_CODES", WEIGHT)
    assert all(name in caught.value.message for name in missing), caught.value.message


def test_8_bit_codes_need_their_scales(inspect: Inspect) -> None:
    assert inspect(ArtifactKind.MODEL, files(INT8, EIGHT_BIT))["quantization_type"] == "int8"
    with pytest.raises(InvalidModel, match=r"lacks model\.layers\.0\.mlp\.up_proj\.SCB"):
        inspect(ArtifactKind.MODEL, files({WEIGHT: INT8[WEIGHT]}, EIGHT_BIT))


def test_codes_of_another_method_are_not_judged(inspect: Inspect) -> None:
    packed = {WEIGHT: PLAIN[WEIGHT]}
    assert inspect(ArtifactKind.MODEL, files(packed, {"quant_method": "hqq"}))["quantization"] == "hqq"
