"""Move a scale per channel out of a module and into the linear layers that read it, so that the function stays.

    y = W x,  x = m(...)      becomes      y = (W diag(s)) x',  x' = m(...) / s

Where the base is stored in a 16-bit dtype, rounding `m / s` would change the function after all. The scales are chosen
so that it does not round: of a norm, `m / s` has a bfloat16's precision, which float32 holds too, and float16 where the
value is a normal number of it, and s is what that leaves; of a linear layer, whose rows and bias are divided, s is a
power of 2.

Shapes: I channels, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST, LARGEST = 2.0**-10, 2.0**10
"""No channel is scaled further than that, so that what is divided stays within float16's range: a value of 2^-4 or more
stays a normal number; one that float16 cannot hold is refused where it is stored."""


def norm_scales(weight_I: Tensor, scales_I: Tensor) -> tuple[Tensor, Tensor]:
    """(weight / s, s) for the scales s nearest to those asked for that make weight / s short.

    The product of the two is the weight to within one rounding of float32; giving back the scales gives the same ones.
    Where the weight is 0 the scale is 1.
    """
    folded_I = (weight_I.float() / scales_I).to(torch.bfloat16).float()
    return folded_I, torch.where(folded_I == 0, 1.0, weight_I.float() / folded_I)


def linear_scales(scales_I: Tensor) -> Tensor:
    """The powers of 2 nearest to the scales, by ratio."""
    return torch.exp2(scales_I.log2().round())


def bounded(scales_I: Tensor) -> Tensor:
    """The scales within SMALLEST and LARGEST."""
    return scales_I.clamp(SMALLEST, LARGEST)
