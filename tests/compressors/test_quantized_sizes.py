"""Predicted sizes are sums that can be worked out by hand, and need no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from compressors.decoder_families import DECODERS
from compressors.quantized_sizes import layer_count, predicted_weight_bytes, quantized_tensors, stored_bytes
from modelpress.quantization_recipes import QuantizeWeights

OUTPUTS, INPUTS = 64, 128
CASES = (
    ({"scheme": "w4a16", "group_size": 32}, OUTPUTS * INPUTS // 2 + OUTPUTS * 4 * 2 + 16),
    (
        {"scheme": "w4a16", "group_size": 32, "symmetric": False},
        OUTPUTS * INPUTS // 2 + OUTPUTS * 4 * 2 + 16 + OUTPUTS // 2 * 4,
    ),
    ({"scheme": "w4a16", "group_size": 32, "scale_dtype": "float32"}, OUTPUTS * INPUTS // 2 + OUTPUTS * 4 * 4 + 16),
    ({"scheme": "w8a16"}, OUTPUTS * INPUTS + OUTPUTS * 2 + 16),
    ({"scheme": "w8a8"}, OUTPUTS * INPUTS + OUTPUTS * 2),
    ({"scheme": "nf4", "algorithm": "rtn"}, OUTPUTS * INPUTS // 2 + OUTPUTS * 2 * 4 + 64 + 80),
)


@pytest.mark.parametrize(("fields", "expected"), CASES, ids=str)
def test_a_layer_takes_its_codes_scales_and_zero_points(fields: dict[str, object], expected: int):
    tensors = quantized_tensors("up", (OUTPUTS, INPUTS), dtype="BF16", stage=QuantizeWeights(**fields))
    assert stored_bytes(tensors) == expected


def test_what_no_group_divides_is_counted_as_it_is():
    shapes = {f"model.layers.0.{name}.weight": (8, 48) for name in DECODERS["llama"].linears}
    dtypes = dict.fromkeys(shapes, "F32")
    whole = predicted_weight_bytes(shapes, dtypes, stage=QuantizeWeights(group_size=32), family=DECODERS["llama"])
    assert 7 * 8 * 48 * 4 < whole < 7 * (8 * 48 * 4 + 120)


def test_layers_are_counted_by_their_tensors():
    names = dict.fromkeys(("model.layers.0.a", "model.layers.1.a", "model.layers.1.b", "model.norm.weight"))
    assert layer_count(names, DECODERS["llama"]) == 2


def test_nothing_of_it_imports_torch():
    code = "import sys, compressors.quantized_sizes, compressors.decoder_targets; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
