"""Footprint: bytes and parameters of an exported model.

A parameter is one element of a weight: of a float tensor with at least one axis, of an integer tensor of at most
8 bits, or of an integer tensor that is dequantized (an INT32 bias). Scales and zero points are not parameters, scalars
and 64-bit integers (shapes, positions) neither. A tensor used twice counts once, equal tensors that the exporter stored
once too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from evaluators.onnx_files import external_files, read_onnx
from modelpress.metrics import Footprint

VERSION = 1
WEIGHT_SUFFIXES = (".onnx", ".onnx.data", ".onnx_data", ".safetensors")

FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})
SMALL_INTEGERS = frozenset({TensorProto.INT8, TensorProto.UINT8, TensorProto.INT4, TensorProto.UINT4})

GRID_INPUTS: Mapping[str, tuple[int, ...]] = {
    "QuantizeLinear": (1, 2),
    "DequantizeLinear": (1, 2),
    "QLinearMatMul": (1, 2, 4, 5, 6, 7),
    "QLinearConv": (1, 2, 4, 5, 6, 7),
    "MatMulInteger": (2, 3),
    "ConvInteger": (2, 3),
}
"""Positions of scales and zero points."""
SHAPE_ONLY = frozenset({"Cast", "Expand", "Gather", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators that hand on the values of their first input."""


def measure_footprint(baseline: Path, *, candidate: Path) -> Footprint:
    """Weigh both model folders."""
    before, after = read_onnx(baseline), read_onnx(candidate)
    return Footprint(
        baseline_bytes=weight_bytes(baseline, before),
        candidate_bytes=weight_bytes(candidate, after),
        baseline_parameters=count_parameters(before),
        candidate_parameters=count_parameters(after),
    )


def weight_bytes(model: Path, proto: ModelProto) -> int:
    """Bytes of every file that holds weights: by its suffix, or because the ONNX file keeps tensors in it."""
    named = {file for file in model.rglob("*") if file.is_file() and file.name.endswith(WEIGHT_SUFFIXES)}
    return sum(file.stat().st_size for file in named | set(external_files(model, proto)))


def count_parameters(proto: ModelProto) -> int:
    """Parameters of the main graph, as this module's first lines define them."""
    graph = proto.graph
    producers = {output: node for node in graph.node for output in node.output}
    grid = {
        _origin(name, producers) for node in graph.node for name in _inputs(node, GRID_INPUTS.get(node.op_type, ()))
    }
    dequantized = {
        _origin(node.input[0], producers) for node in graph.node if node.op_type == "DequantizeLinear" and node.input
    }
    return sum(
        math.prod(tensor.dims)
        for name, tensor in _weights(graph)
        if name not in grid and (name in dequantized or _is_weight(tensor))
    )


def _is_weight(tensor: TensorProto) -> bool:
    return tensor.data_type in SMALL_INTEGERS or (tensor.data_type in FLOATS and len(tensor.dims) > 0)


def _weights(graph: GraphProto) -> Iterator[tuple[str, TensorProto]]:
    """Initializers, and the constants that some exporters write as nodes."""
    for tensor in graph.initializer:
        yield tensor.name, tensor
    for node in graph.node:
        if node.op_type == "Constant":
            yield from ((node.output[0], attribute.t) for attribute in node.attribute if attribute.name == "value")


def _inputs(node: NodeProto, positions: tuple[int, ...]) -> Iterator[str]:
    yield from (node.input[i] for i in positions if i < len(node.input) and node.input[i])


def _origin(name: str, producers: Mapping[str, NodeProto]) -> str:
    """Where a value was stored: back through operators that only rearrange it."""
    while name in producers and producers[name].op_type in SHAPE_ONLY:
        name = producers[name].input[0]
    return name
