"""What ONNX Runtime makes of a file: that it loads and runs, and which operators of its optimised graph are integer."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as _errors

from modelpress.errors import InternalError

INTEGER_KERNELS = frozenset(
    ("QGemm", "QLinearMatMul", "QLinearConv", "QLinearAdd", "QLinearMul", "MatMulInteger", "MatMulIntegerToFloat",
     "DynamicQuantizeMatMul", "ConvInteger", "QAttention")
)  # fmt: skip
CONVERSIONS = frozenset(("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"))
MOVES = frozenset(
    ("Cast", "Concat", "Constant", "Expand", "Flatten", "Gather", "GatherElements", "Identity", "Reshape", "Shape",
     "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze")
)  # fmt: skip
RUNTIME_ERRORS = tuple(e for e in vars(_errors).values() if isinstance(e, type) and issubclass(e, Exception))
SHAPES = ((1, 1), (1, 5), (3, 8), (7, 2))
"""Batches and tokens that every file must run; the model's longest sequence is added to them."""


@dataclass(frozen=True)
class OptimisedGraph:
    """Operators after ONNX Runtime's own optimisation on the CPU; a kind is counted under its type."""

    integer: dict[str, int]
    kept_float: tuple[str, ...]
    """`NAME (TYPE)` of every operator that computes in float: no integer kernel, and more than moving data."""
    conversions: dict[str, int]


def inspect(file: Path) -> OptimisedGraph:
    """Check the file against the ONNX standard and list the operators that will run."""
    onnx.checker.check_model(file, full_check=False)
    with tempfile.TemporaryDirectory() as folder:
        optimised = Path(folder, "optimised.onnx")
        _open(file, save_optimised=optimised)
        nodes = onnx.load(optimised, load_external_data=False).graph.node
    computing = [node for node in nodes if node.op_type not in MOVES]
    return OptimisedGraph(
        integer=_counted(node for node in computing if node.op_type in INTEGER_KERNELS),
        kept_float=tuple(
            f"{node.name} ({node.op_type})" for node in computing if node.op_type not in INTEGER_KERNELS | CONVERSIONS
        ),
        conversions=_counted(node for node in computing if node.op_type in CONVERSIONS),
    )


def check_shapes(file: Path, *, names: Sequence[str], vocabulary: int, longest: int) -> tuple[tuple[int, int], ...]:
    """Run the file on several shapes up to `longest` tokens; the shapes. One token more must be an error.

    Raises InternalError where a shape fails, gives another number of rows, or where the longer one passes.
    """
    session = _open(file)
    shapes = (*(shape for shape in SHAPES if shape[1] <= longest), (1, longest))
    for rows, tokens in shapes:
        logits = _run(session, names, vocabulary=vocabulary, shape=(rows, tokens))
        if len(logits) != rows or not np.isfinite(logits).all():
            raise InternalError(f"the exported model gives no finite logits for {rows} x {tokens} tokens")
    try:
        _run(session, names, vocabulary=vocabulary, shape=(1, longest + 1))
    except RUNTIME_ERRORS:
        return shapes
    raise InternalError(f"the exported model runs on {longest + 1} tokens, one more than it has positions")


def _open(file: Path, *, save_optimised: Path | None = None) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    if save_optimised is not None:
        options.optimized_model_filepath = str(save_optimised)
    try:
        return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except RUNTIME_ERRORS as error:
        raise InternalError(f"ONNX Runtime {onnxruntime.__version__} refuses the exported file") from error


def _run(session: Any, names: Sequence[str], *, vocabulary: int, shape: tuple[int, int]) -> NDArray[np.float32]:
    ids = np.arange(shape[0] * shape[1], dtype=np.int64).reshape(shape) % vocabulary
    values = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    (logits,) = session.run(None, {name: values[name] for name in names})
    return np.asarray(logits)


def _counted(nodes: Any) -> dict[str, int]:
    return dict(sorted(Counter(node.op_type for node in nodes).items()))
