"""Token-wise operators on [B*S, H] instead of [B, S, H].

Every token of every example is treated alike by a linear layer, a layer norm, GELU and a quantizer, so the two
leading dimensions may be one. ONNX Runtime then turns a product and its bias into one Gemm, and leaves
Add + LayerNormalization alone: the SkipLayerNormalization that it otherwise makes of them took three times as long.

Shapes: B examples, S tokens, H features.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from compressors.onnx_edits import array, constant, dims, insert, operand

TOKEN_WISE = ("Add", "LayerNormalization", "Gelu", "QuantizeLinear", "DequantizeLinear", "MatMul", "Tanh", "Relu")


def flatten_rows(graph: ir.Graph) -> int:
    """Flatten every token-wise operator of a graph whose first input is [B, S]; their number."""
    flattener = _RowFlattener(graph)
    return sum(flattener.visit(node) for node in tuple(graph))


class _RowFlattener:
    """One pass over the nodes in order. `former`: the shape that a value had before it became flat."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.tokens = dims(graph.inputs[0])
        self.former: dict[ir.Value, tuple[Any, ...]] = {}
        self.reshaped: dict[ir.Value, ir.Value] = {}

    def visit(self, node: ir.Node) -> bool:
        """Flatten the node, or give it back the shapes that it expects. Whether it was flattened."""
        if not self._is_token_wise(node):
            for index, value in enumerate(node.inputs):
                if value in self.former and not (index == 0 and _sets_every_dimension(node)):
                    node.replace_input_with(index, self._restored(value, before=node))
            return False
        for index, value in enumerate(node.inputs):
            if value is not None and value not in self.former and self._has_tokens(value):
                node.replace_input_with(index, self._flat(value, before=node))
        output = node.outputs[0]
        self.former[output] = dims(output)
        output.shape = ir.Shape([None, self.former[output][2]])
        return True

    def _is_token_wise(self, node: ir.Node) -> bool:
        output = node.outputs[0]
        if (
            node.op_type not in TOKEN_WISE
            or node.domain
            or output in self.graph.outputs
            or not self._has_tokens(output)
        ):
            return False
        values = [value for value in node.inputs if value is not None]
        shapes = [self._dims(value) for value in values]
        if node.op_type == "Add":
            same = all(shape == self._dims(output) or len(shape) == 1 for shape in shapes)
            return same and any(value in self.former for value in values)
        if node.op_type == "MatMul":
            return self._has_tokens(values[0]) and len(shapes[1]) == 2
        if node.op_type == "LayerNormalization" and node.attributes.get_int("axis", -1) not in (-1, 2):
            return False
        return self._has_tokens(values[0]) and all(len(shape) <= 1 for shape in shapes[1:])

    def _dims(self, value: ir.Value) -> tuple[Any, ...]:
        """The value's shape as exported."""
        return self.former.get(value) or dims(value)

    def _has_tokens(self, value: ir.Value) -> bool:
        """Whether the value is [B, S, H], B and S being those of the graph's first input, H fixed."""
        shape = self._dims(value)
        return len(shape) == 3 and shape[:2] == self.tokens and isinstance(shape[2], int)

    def _flat(self, value: ir.Value, *, before: ir.Node) -> ir.Value:
        if value not in self.reshaped:
            producer = value.producer()
            source = operand(producer, 0) if producer is not None and producer.op_type == "Reshape" else value
            shape = constant(self.graph, f"{value.name}.rows_shape", np.array([-1, dims(value)[2]], dtype=np.int64))
            self.reshaped[value] = insert(before, "Reshape", [source, shape], name=f"{value.name}.rows")
        return self.reshaped[value]

    def _restored(self, value: ir.Value, *, before: ir.Node) -> ir.Value:
        if value not in self.reshaped:
            width = constant(self.graph, f"{value.name}.width", np.array([self.former[value][2]], dtype=np.int64))
            tokens = insert(before, "Shape", [self.graph.inputs[0]], name=f"{value.name}.tokens")
            shape = insert(before, "Concat", [tokens, width], {"axis": 0}, name=f"{value.name}.shape")
            self.reshaped[value] = insert(before, "Reshape", [value, shape], name=f"{value.name}.tokens_again")
        return self.reshaped[value]


def _sets_every_dimension(node: ir.Node) -> bool:
    """Whether the node is a Reshape that copies no dimension of its input: it takes either shape."""
    if node.op_type != "Reshape":
        return False
    shape = array(operand(node, 1))
    return shape is None or 0 not in shape
