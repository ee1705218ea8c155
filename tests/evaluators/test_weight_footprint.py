"""Footprint: every layout of one model has as many parameters as the model, and the bytes of its files."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import load_file

from evaluators.weight_footprint import measure_weight_footprint
from tests.compressors.decoders import make_decoder
from tests.evaluators.quantized_decoders import LAYOUTS, quantize


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_decoder(tmp_path_factory.mktemp("footprint") / "base")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_quantized_model_has_the_parameters_that_it_had_before(base, tmp_path, layout):
    quantize(base, tmp_path / "q", layout)
    found = measure_weight_footprint(base, candidate=tmp_path / "q")
    parameters = sum(tensor.numel() for tensor in load_file(base / "model.safetensors").values())
    assert found.baseline_parameters == found.candidate_parameters == parameters
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (base, tmp_path / "q")]
    assert [found.baseline_bytes, found.candidate_bytes] == sizes
    assert 0.2 < found.ratio < 0.5


def test_packed_weights_of_onnx_count_their_values_and_no_scales(base, tmp_path):
    """Two layers share the 3 x 64 codes; beside them a float weight of 6 values."""
    initializers = {
        "codes": np.zeros((3, 2, 16), dtype=np.uint8),
        "scales": np.ones((3, 2), dtype=np.float32),
        "zeros": np.zeros((3, 1), dtype=np.uint8),
        "head": np.ones((3, 2), dtype=np.float32),
    }
    sizes = {"K": 64, "N": 3, "bits": 4, "block_size": 32}
    nodes = [
        helper.make_node("MatMulNBits", [x, "codes", "scales", "zeros"], [y], domain="com.microsoft", **sizes)
        for x, y in (("x", "y"), ("x", "z"))
    ]
    nodes += [helper.make_node("Add", ["y", "z"], ["sum"]), helper.make_node("MatMul", ["sum", "head"], ["logits"])]
    graph = helper.make_graph(
        nodes,
        "packed",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", 64])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", 2])],
        [numpy_helper.from_array(value, name) for name, value in initializers.items()],
    )
    onnx.save(helper.make_model(graph), tmp_path / "model.onnx")
    found = measure_weight_footprint(base, candidate=tmp_path)
    assert found.candidate_parameters == 3 * 64 + 6
    assert found.candidate_bytes == (tmp_path / "model.onnx").stat().st_size
