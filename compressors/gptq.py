"""GPTQ: round one input channel after the other, and let the channels not yet rounded make up for each error.

Frantar, Ashkboos, Hoefler, Alistarh 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers" (arXiv:2210.17323), in its Cholesky form: with H = X^T X and H^-1 = U^T U, the error of channel j divided
by U_jj times row j of U is what the later channels take over. The grid is fixed before, so channels can be visited in
order of falling importance and a group's scale still belongs to neighbouring channels.

Shapes: O outputs, I inputs, G groups along I, B channels of a block. Channels are rows while they are rounded: `w_IO`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from compressors.integer_grid import IntegerGrid, QuantizedWeight

DAMPING_STEPS: tuple[float, ...] = (1.0, 10.0, 100.0)
"""Multiples of the asked damping that are tried until the Hessian can be factored."""
BLOCK = 64
"""Channels that take over each other's errors at once; the others do so when their block is done."""


class SingularHessian(ArithmeticError):
    """A Hessian that tells nothing of the inputs; the message is a clause that says why."""


@dataclass(frozen=True, eq=False)
class FactoredHessian:
    """H with damping as far as GPTQ reads it: the order of the channels, and U of H^-1 = U^T U in that order."""

    order_I: Tensor
    """Channels by falling diagonal of H; int64."""
    upper_II: Tensor
    damping: float
    """The share of the mean diagonal that was added; above the asked one where that left H singular."""
    live_I: Tensor

    def importance(self) -> Tensor:
        """1 / diag(H^-1) [I]: what an error of channel j still costs when all others make up for it; 0 where dead."""
        remaining_I = torch.empty_like(self.upper_II[0])
        remaining_I[self.order_I] = 1 / self.upper_II.square().sum(dim=0)
        return remaining_I * self.live_I


def factor_hessian(h_II: Tensor, *, damping: float) -> FactoredHessian:
    """Factor H = X^T X. A dead channel, 0 on the diagonal, is given the mean diagonal, so it takes over no errors.

    Raises SingularHessian where no channel is live, or where no damping of DAMPING_STEPS helps.
    """
    diagonal_I = h_II.diagonal()
    live_I = diagonal_I > 0
    if not bool(live_I.any()):
        raise SingularHessian("the calibration inputs of this layer are all zero")
    mean = float(diagonal_I[live_I].mean())
    order_I = torch.argsort(diagonal_I, descending=True, stable=True)
    ordered_II = h_II[order_I][:, order_I]
    dead_I = (~live_I)[order_I].to(h_II.dtype) * mean
    for step in DAMPING_STEPS:
        damped_II = ordered_II + torch.diag(dead_I + step * damping * mean)
        upper_II = _upper_of_inverse(damped_II)
        if upper_II is not None:
            return FactoredHessian(order_I, upper_II, step * damping, live_I)
    raise SingularHessian(f"the calibration inputs' Hessian is singular even at a damping of {step * damping:g}")


def _upper_of_inverse(h_II: Tensor) -> Tensor | None:
    """U, upper triangular, with U^T U = H^-1; None where H is not positive definite.

    H = R R^T with R upper triangular is the Cholesky factor of H read backwards, and U = R^-1: H is never inverted.
    """
    factor_II, failed = torch.linalg.cholesky_ex(h_II.flip(0, 1))
    if int(failed) != 0:
        return None
    identity_II = torch.eye(len(h_II), dtype=h_II.dtype, device=h_II.device)
    upper_II = torch.linalg.solve_triangular(factor_II.flip(0, 1), identity_II, upper=True)
    return upper_II if bool(upper_II.isfinite().all()) else None


def blocks(inputs: int, *, size: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of each block of at most `size` channels."""
    for start in range(0, inputs, size):
        yield start, min(start + size, inputs)


def quantize_channels(
    w_OI: Tensor, hessian: FactoredHessian, *, grid: IntegerGrid, scales_OG: Tensor, zeros_OG: Tensor | None
) -> QuantizedWeight:
    """GPTQ on a grid that is fixed: the codes that keep tr(D H D^T), D = W - Q, small."""
    order_I = hessian.order_I
    channels = ChannelGrid(grid, scales_OG, zeros_OG, inputs=w_OI.shape[1])
    w_IO = w_OI.float().t()[order_I]
    codes_IO = torch.empty(w_OI.t().shape, dtype=torch.int8, device=w_OI.device)
    groups = (order_I // channels.group_size).tolist()
    for start, stop in blocks(len(w_IO), size=BLOCK):
        block_BO, upper_BB = w_IO[start:stop], hessian.upper_II[start:stop, start:stop]
        errors_BO = torch.empty_like(block_BO)
        for row, group in enumerate(groups[start:stop]):
            code_O = channels.nearest(block_BO[row], group)
            codes_IO[start + row] = code_O
            errors_BO[row] = (block_BO[row] - channels.value(code_O, group)) / upper_BB[row, row]
            block_BO[row + 1 :].addr_(upper_BB[row, row + 1 :], errors_BO[row], alpha=-1)
        w_IO[stop:].addmm_(hessian.upper_II[start:stop, stop:].t(), errors_BO, alpha=-1)
    codes_OI = torch.empty(w_OI.shape, dtype=torch.int8, device=w_OI.device)
    codes_OI[:, order_I] = codes_IO.t()
    return QuantizedWeight(grid, codes_OI, scales_OG, zeros_OG)


class ChannelGrid:
    """The grid of one weight read channel by channel, every value as the runtime computes it."""

    def __init__(self, grid: IntegerGrid, scales_OG: Tensor, zeros_OG: Tensor | None, *, inputs: int) -> None:
        self.group_size = inputs // scales_OG.shape[1]
        self._range = (grid.lowest, grid.highest)
        self._scales_GO = scales_OG.t().contiguous()
        self._steps_GO = self._scales_GO.float()
        zeros_GO = torch.zeros_like(self._steps_GO) if zeros_OG is None else zeros_OG.t().contiguous().float()
        self._zeros_GO = zeros_GO

    def nearest(self, w_O: Tensor, group: int) -> Tensor:
        """Codes [O] of the values nearest to `w_O`, in float32."""
        code_O = w_O / self._steps_GO[group]
        return code_O.add_(self._zeros_GO[group]).round_().clamp_(*self._range)

    def value(self, code_O: Tensor, group: int) -> Tensor:
        """The values [O] of codes, in float32."""
        counts_O = code_O - self._zeros_GO[group]
        return (counts_O.to(self._scales_GO.dtype) * self._scales_GO[group]).float()
