"""What a recipe asks of the weights of a decoder is possible together, or refused with the cure."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from modelpress.quantization_recipes import QuantizeWeights


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"algorithm": "qat", "scheme": "w8a8", "smooth_quant": 0.5}, "smooth_quant: 'qat' trains the weights as they"),
        ({"smooth_quant": 0.5}, "smooth_quant moves outliers out of 8-bit activations"),
        ({"scheme": "w8a8", "group_size": 64}, "'w8a8' has one symmetric scale per output channel"),
        ({"group_size": None}, "group_size is needed by 'w4a16'"),
        ({"algorithm": "rtn", "scheme": "nf4", "scale_dtype": "float16"}, "'nf4' holds its ranges in float32"),
        ({"scheme": "nf4"}, "'nf4' is quantized by 'rtn' or 'qat', not by 'gptq'"),
    ],
    ids=str,
)
def test_what_cannot_be_together_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        QuantizeWeights(**fields)
