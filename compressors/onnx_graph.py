"""Rewrites of an exported INT8 graph, in standard ONNX operators only, that change nothing that it computes.

| rewrite | why |
|---|---|
| `integer_gemms` | with an int32 bias the whole product is one integer kernel, ONNX Runtime's QGemm |
| `gather_before_dequantizing` | a lookup reads INT8 rows and dequantizes only those, not its whole table |

Shapes: N rows, H features, O outputs, V rows of a table.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from compressors.embedding_tables import RowCodes
from compressors.onnx_edits import array, constant, dims, insert, operand, replace
from modelpress.errors import InternalError


def integer_gemms(graph: ir.Graph) -> int:
    """Turn each product of dequantized [N, H] inputs and [O, H] weights, and its bias, into one Gemm; their number."""
    return sum(_integer_gemm(graph, node) for node in tuple(graph) if node.op_type in ("MatMul", "Gemm"))


def gather_before_dequantizing(graph: ir.Graph, tables: Mapping[str, RowCodes]) -> int:
    """Replace each float table, by initializer name, with its INT8 codes; their number.

    Raises InternalError where a table is not in the graph, or is read by anything but a lookup.
    """
    for name, table in tables.items():
        if name not in graph.initializers:
            raise InternalError(f"the exported graph has no table {name!r}")
        codes = constant(graph, f"{name}.codes", table.codes.numpy())
        scales = constant(graph, f"{name}.scales", table.scales[:, None].numpy())
        for use in tuple(graph.initializers[name].uses()):
            _gather_rows(graph, use.node, codes, scales)
    return len(tables)


def _integer_gemm(graph: ir.Graph, node: ir.Node) -> bool:
    inputs, weight = operand(node, 0), _weight_of(node)
    dequantized_inputs, dequantized_weight = inputs.producer(), weight.producer()
    if dequantized_inputs is None or dequantized_weight is None or len(dims(inputs)) != 2:
        return False
    if {dequantized_inputs.op_type, dequantized_weight.op_type} != {"DequantizeLinear"}:
        return False
    if node.op_type == "Gemm" and node.attributes.get_int("transB", 0) != 1:
        return False
    last, bias = _bias_of(node)
    output = last.outputs[0]
    terms = [inputs, weight]
    if bias is not None:
        scale_O = array(operand(dequantized_inputs, 1)) * array(operand(dequantized_weight, 1))
        terms.append(_int32_bias(graph, last, array(bias), scale_O.astype(np.float32)))
    replace(graph, last, insert(last, "Gemm", terms, {"transB": 1}, name=f"{output.name}.integer", like=output))
    return True


def _weight_of(node: ir.Node) -> ir.Value:
    """The second factor as [O, H]: what a Transpose in front of a MatMul reads, or a Gemm itself."""
    weight = operand(node, 1)
    producer = weight.producer()
    if node.op_type == "MatMul" and producer is not None and producer.op_type == "Transpose":
        return operand(producer, 0)
    return weight


def _bias_of(node: ir.Node) -> tuple[ir.Node, ir.Value | None]:
    """The last node of the product (itself, or the Add of its bias), and the bias."""
    if node.op_type == "Gemm":
        return node, node.inputs[2] if len(node.inputs) > 2 else None
    users = [use.node for use in node.outputs[0].uses()]
    if len(users) == 1 and users[0].op_type == "Add":
        others = [value for value in users[0].inputs if value is not None and value is not node.outputs[0]]
        if len(others) == 1 and array(others[0]) is not None and len(dims(others[0])) == 1:
            return users[0], others[0]
    return node, None


def _int32_bias(
    graph: ir.Graph, before: ir.Node, bias_O: NDArray[np.float32], scale_O: NDArray[np.float32]
) -> ir.Value:
    """The bias as DequantizeLinear of the int32 codes that it stands on."""
    name = f"{before.outputs[0].name}.bias"
    codes_O = np.rint(bias_O.astype(np.float64) / scale_O).astype(np.int32)
    parts = {"codes": codes_O, "scale": scale_O, "zero_point": np.zeros_like(codes_O)}
    constants = [constant(graph, f"{name}.{part}", content) for part, content in parts.items()]
    return insert(before, "DequantizeLinear", constants, {"axis": 0}, name=name)


def _gather_rows(graph: ir.Graph, lookup: ir.Node, codes: ir.Value, scales: ir.Value) -> None:
    if lookup.op_type != "Gather" or lookup.attributes.get_int("axis", 0) != 0:
        raise InternalError(f"an embedding table is read by {lookup.op_type}, not by a lookup of its rows")
    ids, output = operand(lookup, 1), lookup.outputs[0]
    rows = insert(lookup, "Gather", [codes, ids], {"axis": 0}, name=f"{output.name}.codes")
    row_scales = insert(lookup, "Gather", [scales, ids], {"axis": 0}, name=f"{output.name}.scales")
    floats = insert(lookup, "Cast", [rows], {"to": ir.DataType.FLOAT.value}, name=f"{output.name}.float")
    replace(graph, lookup, insert(lookup, "Mul", [floats, row_scales], name=f"{output.name}.rows", like=output))
