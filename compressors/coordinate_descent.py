"""Choose codes again, one input channel after the other, while all other channels stay as they are.

Behdin et al. 2023, "QuantEase" (arXiv:2309.01885): with D = W - Q, the best value of channel j given all others is
q_j + (D H)_j / H_jj, and the nearest point of the grid is the minimum along that coordinate. So tr(D H D^T) does
not rise, in any row: exactly for values (code - zero) * scale in float32, and up to the scale dtype's rounding of them
where that is shorter. It starts from codes that another method chose.

Shapes: O outputs, I inputs, G groups along I, B channels of a block. `slope_IO` is (D H)^T.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressors.gptq import BLOCK, ChannelGrid, blocks
from compressors.integer_grid import QuantizedWeight


def descend(weight: QuantizedWeight, w_OI: Tensor, h_II: Tensor) -> QuantizedWeight:
    """One pass over all channels. Codes of dead channels, 0 on the diagonal of H, stay."""
    grid = weight.grid
    channels = ChannelGrid(grid, weight.scales_OG, weight.zeros_OG, inputs=w_OI.shape[1])
    slope_IO = h_II @ (w_OI.float() - weight.dequantized()).t()
    codes_IO = weight.codes_OI.t().float()
    diagonal = h_II.diagonal().tolist()
    for start, stop in blocks(len(diagonal), size=BLOCK):
        block_BO, h_BB = slope_IO[start:stop], h_II[start:stop, start:stop]
        moves_BO = torch.zeros_like(block_BO)
        for row, curvature in enumerate(diagonal[start:stop]):
            if curvature <= 0:
                continue
            group = (start + row) // channels.group_size
            value_O = channels.value(codes_IO[start + row], group)
            code_O = channels.nearest(value_O + block_BO[row] / curvature, group)
            codes_IO[start + row] = code_O
            moves_BO[row] = channels.value(code_O, group) - value_O
            block_BO[row:].addr_(h_BB[row, row:], moves_BO[row], alpha=-1)
        slope_IO[stop:].addmm_(h_II[stop:, start:stop], moves_BO, alpha=-1)
    return QuantizedWeight(grid, codes_IO.t().to(torch.int8).contiguous(), weight.scales_OG, weight.zeros_OG)
