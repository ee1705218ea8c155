"""Footprint of a language model: bytes on disk, and parameters of the model that is stored, whatever its layout.

A quantized weight counts as many parameters as it had before: codes are unpacked, scales and zero points are none.
"""

from __future__ import annotations

from pathlib import Path

from onnx import ModelProto

from evaluators import footprint
from evaluators.local_weights import LocalWeights
from evaluators.onnx_files import MODEL_FILE, read_onnx
from evaluators.quantized_reading import count_parameters, plain
from modelpress.metrics import Footprint

PACKED = "MatMulNBits"
"""ONNX Runtime's operator on packed codes: attributes K inputs and N outputs; inputs 1 to 4 are codes, scales, zero
points and group indices."""


def measure_weight_footprint(baseline: Path, *, candidate: Path) -> Footprint:
    """Weigh both model folders, each as safetensors or as ONNX."""
    (baseline_bytes, baseline_parameters), (candidate_bytes, candidate_parameters) = map(_weigh, (baseline, candidate))
    return Footprint(
        baseline_bytes=baseline_bytes,
        candidate_bytes=candidate_bytes,
        baseline_parameters=baseline_parameters,
        candidate_parameters=candidate_parameters,
    )


def _weigh(model: Path) -> tuple[int, int]:
    """Bytes of the files with weights, and parameters."""
    if (model / MODEL_FILE).is_file():
        proto = read_onnx(model)
        return footprint.weight_bytes(model, proto), onnx_parameters(proto)
    files = (file for file in model.rglob("*.safetensors") if file.is_file())
    return sum(file.stat().st_size for file in files), count_parameters(plain(LocalWeights.open(model)).tensors)


def onnx_parameters(proto: ModelProto) -> int:
    """As `footprint.count_parameters`; a packed weight counts its N x K values, once however often it is used."""
    packed = [node for node in proto.graph.node if node.op_type == PACKED]
    values: dict[str, int] = {}
    for node in packed:
        sizes = {attribute.name: attribute.i for attribute in node.attribute}
        values[node.input[1]] = sizes["K"] * sizes["N"]
    parts = {name for node in packed for name in node.input[1:5]}
    rest = ModelProto()
    rest.CopyFrom(proto)
    del rest.graph.initializer[:]
    rest.graph.initializer.extend(tensor for tensor in proto.graph.initializer if tensor.name not in parts)
    return footprint.count_parameters(rest) + sum(values.values())
