"""ONNX files read as data, before any runtime sees them.

An ONNX file may say that a tensor's bytes lie in another file. That location comes from whoever made the model, so it
is followed only to a regular file inside the model's own folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from modelpress.errors import InvalidModel, InvalidRequest
from modelpress.manifests import check_relative_path

MODEL_FILE = "model.onnx"


def read_onnx(model: Path) -> ModelProto:
    """Parse `model.onnx` of a model folder without its external data, whose places are checked.

    Raises InvalidModel where the file is missing or no ONNX, or where a tensor's bytes are not all inside the folder.
    """
    file = model / MODEL_FILE
    if not file.is_file():
        raise InvalidModel(f"the model has no {MODEL_FILE}: export it first")
    try:
        proto = onnx.load(file, load_external_data=False)
    except (DecodeError, ValueError) as error:
        raise InvalidModel(f"{MODEL_FILE} is not an ONNX file") from error
    external_files(model, proto)
    return proto


def external_files(model: Path, proto: ModelProto) -> tuple[Path, ...]:
    """The side files that hold tensors of the model, each one checked to be a regular file of its folder."""
    external = (tensor for tensor in all_tensors(proto) if tensor.data_location == TensorProto.EXTERNAL)
    locations = dict.fromkeys(_checked_location(model, tensor) for tensor in external)
    return tuple(model / location for location in locations)


def all_tensors(proto: ModelProto) -> Iterator[TensorProto]:
    """Every tensor of a model: initializers and attributes, in subgraphs and functions too."""
    yield from _graph_tensors(proto.graph)
    for function in proto.functions:
        yield from _node_tensors(function.node)
        yield from _attribute_tensors(function.attribute_proto)
    for training in proto.training_info:
        yield from _graph_tensors(training.initialization)
        yield from _graph_tensors(training.algorithm)


def _graph_tensors(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _node_tensors(graph.node)


def _node_tensors(nodes: Iterable[NodeProto]) -> Iterator[TensorProto]:
    for node in nodes:
        yield from _attribute_tensors(node.attribute)


def _attribute_tensors(attributes: Iterable[AttributeProto]) -> Iterator[TensorProto]:
    for attribute in attributes:
        yield from (attribute.t, *attribute.tensors)
        for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
            yield from (sparse.values, sparse.indices)
        for graph in (attribute.g, *attribute.graphs):
            yield from _graph_tensors(graph)


def _checked_location(model: Path, tensor: TensorProto) -> str:
    """Where an external tensor lies, relative to the model's folder; all its bytes are there."""
    facts: dict[str, str] = {entry.key: entry.value for entry in tensor.external_data}
    location = facts.get("location", "")
    fault = _fault(model, location, facts)
    if fault:
        raise InvalidModel(
            f"external data of tensor {tensor.name[:120]!r} at {location[:120]!r} {fault}", reason="EXTERNAL_DATA"
        )
    return location


def _fault(model: Path, location: str, facts: dict[str, str]) -> str:
    """What is wrong with a tensor's place, empty where nothing is."""
    try:
        check_relative_path(location)
        offset, length = int(facts.get("offset") or 0), int(facts.get("length") or 0)
    except InvalidRequest:
        return "leaves the model's folder: store it beside model.onnx"
    except ValueError:
        return "has an offset or length that is no number"
    file = model / location
    if any(part.is_symlink() for part in (file, *file.parents) if part.is_relative_to(model) and part != model):
        return "is a link: store a regular file beside model.onnx"
    if not file.is_file():
        return "is missing: upload the side file too"
    if offset < 0 or length < 0 or offset + length > file.stat().st_size:
        return "is shorter than the tensor needs: upload the whole file"
    return ""
