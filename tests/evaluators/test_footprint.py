"""Bytes and parameters count weights, all of them, and nothing else."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from evaluators.footprint import count_parameters, measure_footprint


def _graph(nodes, tensors) -> onnx.ModelProto:
    initializers = [numpy_helper.from_array(value, name) for name, value in tensors.items()]
    return helper.make_model(helper.make_graph(nodes, "g", [], [], initializers))


def test_floats_with_an_axis_count_and_scalars_and_shapes_do_not():
    tensors = {
        "weight": np.zeros((3, 4), np.float32),
        "bias": np.zeros(4, np.float16),
        "epsilon": np.float32(1e-5),
        "shape": np.array([1, 2]),
    }
    assert count_parameters(_graph([], tensors)) == 12 + 4


def test_quantized_weights_count_and_their_grids_do_not():
    tensors = {
        "weight": np.zeros((3, 4), np.int8),
        "scale": np.zeros(4, np.float32),
        "zero": np.zeros(4, np.int8),
        "bias": np.zeros(4, np.int32),
        "bias_scale": np.zeros(4, np.float32),
        "input_scale": np.zeros(1, np.float32),
        "input_zero": np.zeros(1, np.uint8),
    }
    nodes = [
        helper.make_node("DequantizeLinear", ["weight", "scale", "zero"], ["w"], axis=1),
        helper.make_node("DequantizeLinear", ["bias", "bias_scale"], ["b"]),
        helper.make_node("QuantizeLinear", ["x", "input_scale", "input_zero"], ["q"]),
    ]
    assert count_parameters(_graph(nodes, tensors)) == 12 + 4


def test_scales_that_are_gathered_before_they_dequantize_do_not_count():
    tensors = {"table": np.zeros((10, 4), np.int8), "scales": np.zeros((10, 1), np.float32), "axes": np.array([-1])}
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Gather", ["scales", "ids"], ["wide"]),
        helper.make_node("Squeeze", ["wide", "axes"], ["row_scales"]),
        helper.make_node("DequantizeLinear", ["rows", "row_scales"], ["y"], axis=0),
    ]
    assert count_parameters(_graph(nodes, tensors)) == 40


def test_weights_that_are_constant_nodes_count():
    weight = numpy_helper.from_array(np.zeros((2, 3), np.float32), "w")
    assert count_parameters(_graph([helper.make_node("Constant", [], ["w"], value=weight)], {})) == 6


def test_bytes_are_those_of_every_file_that_holds_weights(tmp_path, table, write_model):
    baseline, candidate = (write_model(tmp_path / name, table) for name in ("baseline", "candidate"))
    (candidate / "extra.safetensors").write_bytes(b"12345")
    proto = onnx.load(candidate / "model.onnx")
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="weights.bin")
    (candidate / "weights.bin").write_bytes(table.tobytes())
    (candidate / "model.onnx").write_bytes(proto.SerializeToString())
    footprint = measure_footprint(baseline, candidate=candidate)
    assert footprint.baseline_bytes == (baseline / "model.onnx").stat().st_size
    assert footprint.candidate_bytes == (candidate / "model.onnx").stat().st_size + table.nbytes + 5
    assert footprint.baseline_parameters == footprint.candidate_parameters == table.size
    assert footprint.ratio == pytest.approx(footprint.candidate_bytes / footprint.baseline_bytes)
