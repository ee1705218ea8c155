"""bitsandbytes' number formats, as arithmetic on tensors: 4-bit codes with a scale per block, 8-bit codes per row.

NF4 and double quantization: Dettmers et al. 2023 (QLoRA). LLM.int8: Dettmers et al. 2022. Legend: N values of the
weight, B its blocks (the last may be shorter), O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

CODES: Mapping[str, tuple[float, ...]] = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": (
        *(0.0, 0.0052083334885537624, 0.6666666865348816, 1.0),
        *(0.3333333432674408, 0.5, 0.1666666716337204, 0.25),
        *(0.0, -0.0052083334885537624, -0.6666666865348816, -1.0),
        *(-0.3333333432674408, -0.5, -0.1666666716337204, -0.25),
    ),
}
"""What each of the 16 codes stands for in a block whose largest absolute value is 1."""
INT8_STEP = 1 / 127


def from_4bit(packed: Tensor, scales_B: Tensor, *, code: Tensor, blocksize: int, count: int) -> Tensor:
    """The `count` values of two codes per byte, high nibble first, in FP32 and one dimension.

    `packed` is uint8 with a code to spare where `count` is odd; `code` has the 16 values of the codes.
    """
    pairs = torch.stack((code.repeat_interleave(16), code.repeat(16)), dim=1)
    values_N = pairs.index_select(0, packed.reshape(-1).int()).reshape(-1)[:count]
    return _scaled(values_N, scales_B, blocksize)


def from_8bit_blocks(codes_N: Tensor, scales_B: Tensor, *, code: Tensor, blocksize: int) -> Tensor:
    """Values of 8-bit codes that look up `code` (256 values), in FP32: the scales of double quantization."""
    return _scaled(code.index_select(0, codes_N.reshape(-1).int()), scales_B, blocksize)


def from_int8_rows(codes_OI: Tensor, scales_O: Tensor) -> Tensor:
    """LLM.int8 in FP32: 127 stands for the row's largest absolute value."""
    return codes_OI.float().mul_(scales_O.float().unsqueeze(1)).mul_(INT8_STEP)


def _scaled(values_N: Tensor, scales_B: Tensor, blocksize: int) -> Tensor:
    """Each block times its scale, in place."""
    whole = values_N.numel() // blocksize
    blocks = values_N[: whole * blocksize].view(whole, blocksize)
    blocks.mul_(scales_B[:whole].unsqueeze(1))
    values_N[whole * blocksize :].mul_(scales_B[whole:])
    return values_N
