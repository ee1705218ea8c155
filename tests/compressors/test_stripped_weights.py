"""Case 36: codes without their scales are refused by name, from the header alone."""

from __future__ import annotations

import pytest

from compressors.stripped_weights import refuse_stripped
from modelpress.errors import InvalidModel
from modelpress.safetensors_header import TensorEntry
from tests.compressors.test_bitsandbytes_layout import NAME, STATE, stored

DTYPES = {"torch.uint8": "U8", "torch.float32": "F32"}
HEADER = {
    name: TensorEntry(name, DTYPES[str(tensor.dtype)], tuple(tensor.shape), 0, 0) for name, tensor in stored().items()
}


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ((STATE, f"{NAME}.absmax", f"{NAME}.quant_map"), ["quant_state", "absmax", "quant_map"]),
        ((STATE,), ["quant_state"]),
        ((f"{NAME}.absmax",), ["absmax"]),
    ],
)
def test_codes_without_their_scales_are_refused_by_what_they_lack(lost: tuple[str, ...], said: list[str]) -> None:
    with pytest.raises(InvalidModel) as caught:
        refuse_stripped({name: entry for name, entry in HEADER.items() if name not in lost})
    assert all(part in caught.value.message for part in (repr(NAME), *said))
    assert (caught.value.reason, caught.value.field) == ("STRIPPED_WEIGHTS", NAME)


def test_a_lone_layer_is_refused_too() -> None:
    with pytest.raises(InvalidModel, match="'weight'"):
        refuse_stripped({"weight": TensorEntry("weight", "U8", (1024, 1), 0, 1024)})


def test_whole_weights_and_other_bytes_pass() -> None:
    others = {
        "mask": ("U8", (8, 1)),
        "a.weight": ("U8", (8, 4)),
        "b.weight": ("F32", (8, 1)),
        "c.weight": ("I8", (8, 8)),
    }
    refuse_stripped(HEADER | {name: TensorEntry(name, dtype, shape, 0, 0) for name, (dtype, shape) in others.items()})
