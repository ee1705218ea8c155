"""MatMulNBits gets exactly the codes, scales and zero points of a weight, and computes in FP32."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from compressors.integer_grid import IntegerGrid, QuantizedWeight, dequantize
from compressors.matmul_nbits import BlockedWeight, blocked, row_block

GRIDS = [
    (num_bits, symmetric, group_size)
    for num_bits in (4, 8)
    for symmetric in (True, False)
    for group_size in (32, 64, 128, None)
]


def random_weight(
    num_bits: int, symmetric: bool, group_size: int | None, *, inputs: int = 384, dtype: torch.dtype = torch.float32
) -> QuantizedWeight:
    """Every code and zero point that the grid has; scales over three orders of magnitude."""
    grid = IntegerGrid(num_bits, symmetric, group_size, dtype)
    generator = torch.Generator().manual_seed(num_bits)
    shape = (24, grid.groups(inputs))
    codes_OI = torch.randint(grid.lowest, grid.highest + 1, (24, inputs), generator=generator, dtype=torch.int8)
    zeros_OG = torch.randint(grid.lowest, grid.highest + 1, shape, generator=generator, dtype=torch.int8)
    scales_OG = (10 ** (-3 * torch.rand(shape, generator=generator))).to(dtype)
    return QuantizedWeight(grid, codes_OI, scales_OG, None if symmetric else zeros_OG)


def values_of(stored: BlockedWeight) -> np.ndarray:
    """What the operator's documentation makes of its inputs, [O, I] in FP64."""
    codes, zeros = stored.codes_ONP.numpy(), None if stored.zeros_OZ is None else stored.zeros_OZ.numpy()
    scales = stored.scales_ON.numpy().astype(np.float64)
    if stored.num_bits == 4:
        codes = np.stack((codes & 15, codes >> 4), axis=-1).reshape(*codes.shape[:2], -1)
        zeros = None if zeros is None else np.stack((zeros & 15, zeros >> 4), axis=-1).reshape(len(zeros), -1)
    default = 1 << (stored.num_bits - 1)
    offsets = np.full(scales.shape, default) if zeros is None else zeros[:, : scales.shape[1]].astype(int)
    return ((codes.astype(int) - offsets[..., None]) * scales[..., None]).reshape(len(codes), -1)[:, : stored.inputs]


def product(stored: BlockedWeight, inputs: np.ndarray) -> np.ndarray:
    """The operator's output in ONNX Runtime."""
    outputs = len(stored.codes_ONP)
    constants = {"codes": stored.codes_ONP, "scales": stored.scales_ON, "zeros": stored.zeros_OZ}
    given = {name: tensor.numpy() for name, tensor in constants.items() if tensor is not None}
    sizes = {"K": stored.inputs, "N": outputs, "bits": stored.num_bits, "block_size": stored.block_size}
    node = helper.make_node("MatMulNBits", ["x", *given], ["y"], domain="com.microsoft", **sizes)
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", stored.inputs])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", outputs])],
        [numpy_helper.from_array(array, name) for name, array in given.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": inputs})
    return found


def check_product(weight: QuantizedWeight, inputs: np.ndarray) -> None:
    w_OI = weight.dequantized(torch.float32).numpy().astype(np.float64)
    bound = 2e-6 * (np.abs(inputs) @ np.abs(w_OI).T)  # a thousandth of a step of inputs rounded to 8 bits
    assert (np.abs(product(blocked(weight), inputs) - inputs @ w_OI.T) <= bound).all()


@pytest.mark.parametrize(("num_bits", "symmetric", "group_size"), GRIDS)
def test_the_layout_holds_the_very_values(num_bits: int, symmetric: bool, group_size: int | None) -> None:
    weight = random_weight(num_bits, symmetric, group_size)
    exact = dequantize(weight.codes_OI, weight.scales_OG.double(), weight.zeros_OG)
    assert np.array_equal(values_of(blocked(weight)), exact.numpy())


@pytest.mark.parametrize(("num_bits", "symmetric", "group_size"), GRIDS)
@pytest.mark.parametrize("rows", [1, 7])
def test_the_runtime_computes_in_fp32(num_bits: int, symmetric: bool, group_size: int | None, rows: int) -> None:
    weight = random_weight(num_bits, symmetric, group_size)
    inputs = np.random.default_rng(rows).standard_normal((rows, 384)).astype(np.float32)
    check_product(weight, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_of_16_bits_keep_their_values(dtype: torch.dtype) -> None:
    weight = random_weight(4, False, 64, dtype=dtype)
    assert torch.equal(blocked(weight).scales_ON, weight.scales_OG.float())


@pytest.mark.parametrize(("inputs", "block"), [(576, 64), (1024, 256), (32, 32), (24, 16), (7, 16)])
def test_one_scale_per_row_is_repeated_for_blocks_of_powers_of_2(inputs: int, block: int) -> None:
    assert row_block(inputs) == block
    weight = random_weight(8, False, None, inputs=inputs)
    stored = blocked(weight)
    assert stored.codes_ONP.shape == (24, -(-inputs // block), block)
    assert np.array_equal(values_of(stored), dequantize(weight.codes_OI, weight.scales_OG.double(), weight.zeros_OG))
    check_product(weight, np.random.default_rng(0).standard_normal((3, inputs)).astype(np.float32))


def test_codes_lie_two_in_a_byte_the_lower_nibble_first() -> None:
    grid = IntegerGrid(4, False, 32, torch.float32)
    codes_OI = torch.arange(-8, 8, dtype=torch.int8).repeat(4)[None]
    weight = QuantizedWeight(grid, codes_OI, torch.ones(1, 2), torch.tensor([[-8, 7]], dtype=torch.int8))
    stored = blocked(weight)
    assert stored.codes_ONP[0, 0, :8].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert stored.zeros_OZ is not None and stored.zeros_OZ.tolist() == [[0xF0]]
