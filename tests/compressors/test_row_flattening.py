import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from compressors.row_flattening import flatten_rows

WIDTH = 4
GRAPH = f"""
<ir_version: 9, opset_import: ["" : 20]>
layer (float[B, S, {WIDTH}] x, float[{WIDTH}] gain, float[{WIDTH}, {WIDTH}] weight, float[{WIDTH}] bias)
    => (float[S, B, {WIDTH}] swapped, float[B, S, {WIDTH}] y)
<float[B, S, {WIDTH}] normed, float[B, S, {WIDTH}] product, float[B, S, {WIDTH}] biased, float[B, S, {WIDTH}] added>
{{
    normed = LayerNormalization <axis = -1> (x, gain)
    product = MatMul (normed, weight)
    biased = Add (product, bias)
    added = Add (biased, normed)
    swapped = Transpose <perm = [1, 0, 2]> (added)
    y = Gelu (added)
}}
"""


def flattened() -> tuple[onnx.ModelProto, onnx.ModelProto, int]:
    plain = onnx.parser.parse_model(GRAPH)
    model = ir.from_proto(plain)
    ids = ir.val("ids", shape=ir.Shape(["B", "S"]), type=ir.TensorType(ir.DataType.INT64))
    model.graph.inputs.insert(0, ids)
    moved = flatten_rows(model.graph)
    return plain, ir.to_proto(model), moved


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()})


def test_flat_rows_compute_what_tokens_did_and_shapes_come_back() -> None:
    plain, flat, moved = flattened()
    assert moved == 4  # y is an output, and keeps its shape; Transpose is not token-wise
    generator = np.random.default_rng(0)
    for rows, tokens in ((1, 1), (3, 5)):
        shapes = {"x": (rows, tokens, WIDTH), "gain": WIDTH, "weight": (WIDTH, WIDTH), "bias": WIDTH}
        feeds = {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
        expected = run(plain, feeds)
        found = run(flat, feeds | {"ids": np.zeros((rows, tokens), np.int64)})
        for left, right in zip(expected, found, strict=True):
            np.testing.assert_allclose(left, right, atol=1e-6)


def test_what_stands_between_two_flat_operators_is_flat_too() -> None:
    _, flat, _ = flattened()
    kinds = [node.op_type for node in flat.graph.node]
    assert kinds.count("Reshape") == 2  # one in, one out for both readers of `added`
