"""ONNX Runtime's operator for quantized weights, com.microsoft MatMulNBits, on exactly the codes of `QuantizedWeight`.

y = x W', W = (code - zero point) * scale, computed in FP32: `accuracy_level` is left out, so x is never rounded. Layout
of its inputs, as the operator's documentation has it: codes and zero points unsigned, moved by 2^(b-1); 4-bit ones two
per byte, the lower nibble first; a row's inputs are cut into blocks that have one scale each.

Shapes: O outputs, I inputs, G groups of the grid, N blocks of a row, K inputs of a block, P bytes of a block's codes,
Z bytes of a row's zero points.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compressors.integer_grid import QuantizedWeight, dequantize
from modelpress.errors import InternalError

SMALLEST_BLOCK, LARGEST_BLOCK = 16, 256


@dataclass(frozen=True, eq=False)
class BlockedWeight:
    """A weight as MatMulNBits stores it. `zeros_OZ` is None where the grid is symmetric: the operator's default."""

    codes_ONP: Tensor
    """uint8."""
    scales_ON: Tensor
    """float32: the grid's scales exactly."""
    zeros_OZ: Tensor | None
    """uint8."""
    num_bits: int
    block_size: int
    inputs: int


def blocked(weight: QuantizedWeight) -> BlockedWeight:
    """The weight in the operator's layout: (code - zero) * scale in FP32 is unchanged.

    A scale per row (no `group_size`) is repeated for each of the row's blocks. Inputs that the last block lacks are
    filled with the zero point.
    """
    grid = weight.grid
    if grid.num_bits not in (4, 8):
        raise InternalError(f"MatMulNBits is written for 4 and 8 bits, not for {grid.num_bits}")
    inputs, offset = weight.codes_OI.shape[1], 1 << (grid.num_bits - 1)
    block = grid.group_size or row_block(inputs)
    blocks = -(-inputs // block)
    zeros_ON = None if weight.zeros_OG is None else _per_block(weight.zeros_OG, blocks)
    return BlockedWeight(
        codes_ONP=packed(_blocks(weight.codes_OI, zeros_ON, block=block, blocks=blocks) + offset, grid.num_bits),
        scales_ON=_per_block(weight.scales_OG, blocks).float(),
        zeros_OZ=None if zeros_ON is None else packed(zeros_ON.short() + offset, grid.num_bits),
        num_bits=grid.num_bits,
        block_size=block,
        inputs=inputs,
    )


def row_block(inputs: int) -> int:
    """The largest block, a power of 2 as the operator wants it, that divides a row; or the smallest one there is."""
    return max(math.gcd(inputs, LARGEST_BLOCK), SMALLEST_BLOCK)


def packed(codes: Tensor, num_bits: int) -> Tensor:
    """Unsigned codes as uint8 along the last dimension: one per byte, or two, the lower nibble first.

    An odd number of 4-bit codes leaves the last high nibble 0.
    """
    codes = codes.to(torch.uint8)
    if num_bits == 8:
        return codes.contiguous()
    codes = nn.functional.pad(codes, (0, codes.shape[-1] % 2))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _per_block(values_OG: Tensor, blocks: int) -> Tensor:
    """[O, N]: as it is, or one value per row repeated."""
    return values_OG.expand(-1, blocks).contiguous()


def _blocks(codes_OI: Tensor, zeros_ON: Tensor | None, *, block: int, blocks: int) -> Tensor:
    """Signed codes [O, N, K], int16."""
    outputs, inputs = codes_OI.shape
    codes_OI = codes_OI.short()
    missing = block * blocks - inputs
    if missing:
        filling_O1 = torch.zeros(outputs, 1, dtype=torch.int16) if zeros_ON is None else zeros_ON[:, -1:].short()
        codes_OI = torch.cat((codes_OI, filling_O1.expand(-1, missing)), dim=1)
    return codes_OI.reshape(outputs, blocks, block)


class MatMulNBits(nn.Module):
    """A linear layer that torch.onnx.export writes as one MatMulNBits, and the addition of its bias. It cannot run."""

    def __init__(self, weight: QuantizedWeight, bias_O: nn.Parameter | None) -> None:
        super().__init__()
        stored = blocked(weight)
        self.outputs = len(stored.codes_ONP)
        self.attributes: Mapping[str, int] = {
            "K": stored.inputs,
            "N": self.outputs,
            "bits": stored.num_bits,
            "block_size": stored.block_size,
        }
        self.codes = nn.Buffer(stored.codes_ONP)
        self.scales = nn.Buffer(stored.scales_ON)
        self.zeros = None if stored.zeros_OZ is None else nn.Buffer(stored.zeros_OZ)
        self.bias = bias_O

    def forward(self, inputs: Tensor) -> Tensor:
        zeros = () if self.zeros is None else (self.zeros,)
        outputs = torch.onnx.ops.symbolic(
            "com.microsoft::MatMulNBits",
            (inputs, self.codes, self.scales, *zeros),
            dict(self.attributes),
            dtype=inputs.dtype,
            shape=(*inputs.shape[:-1], self.outputs),
            version=1,
        )
        return outputs if self.bias is None else outputs + self.bias


class CodedLinear(nn.Module):
    """The same layer in torch: its weight is made from the codes whenever it runs, in FP32."""

    def __init__(self, weight: QuantizedWeight, bias_O: nn.Parameter | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias_O

    def forward(self, inputs: Tensor) -> Tensor:
        w_OI = dequantize(self.weight.codes_OI, self.weight.scales_OG.float(), self.weight.zeros_OG)
        return nn.functional.linear(inputs, w_OI, self.bias)
