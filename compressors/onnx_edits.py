"""Small edits of an ONNX graph: read a constant, add one, put a node in front of another, replace a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from modelpress.errors import InternalError


def operand(node: ir.Node, index: int) -> ir.Value:
    """Input `index` of a node that must have it."""
    value = node.inputs[index] if index < len(node.inputs) else None
    if value is None:
        raise InternalError(f"{node.op_type} {node.name!r} of the exported graph has no input {index}")
    return value


def dims(value: ir.Value) -> tuple[Any, ...]:
    """Each dimension, an int or a symbol; () for a scalar and where the shape is unknown."""
    return () if value.shape is None else tuple(value.shape)


def array(value: ir.Value) -> Any:
    """The constant behind a value as numpy array; None where it is computed."""
    return None if value.const_value is None else value.const_value.numpy()


def constant(graph: ir.Graph, name: str, content: NDArray[Any]) -> ir.Value:
    """A new initializer; the name must be free."""
    value = ir.val(name, const_value=ir.tensor(content, name=name))
    graph.register_initializer(value)
    return value


def insert(
    before: ir.Node,
    op_type: str,
    inputs: Sequence[ir.Value],
    attributes: Mapping[str, Any] | None = None,
    *,
    name: str,
    like: ir.Value | None = None,
) -> ir.Value:
    """The output of a new node in front of `before`, with the type and shape of `like`."""
    if before.graph is None:
        raise InternalError(f"node {before.name!r} is in no graph")
    node = ir.node(op_type, inputs, attributes, name=name)
    output = node.outputs[0]
    output.name = name
    if like is not None:
        output.shape, output.type = like.shape, like.type
    before.graph.insert_before(before, node)
    return output


def replace(graph: ir.Graph, node: ir.Node, value: ir.Value) -> None:
    """Let `value` take the place, and the name where it is the graph's output, of what `node` gives."""
    output = node.outputs[0]
    name, is_output = output.name, output in graph.outputs
    ir.convenience.replace_all_uses_with(output, value, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    if is_output:
        value.name = name
