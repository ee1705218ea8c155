"""How far a layer's linear outputs move when their weights are quantized: |Y - Y'| / |Y|, Y = X W^T on the same X.

With H = X^T X the squared norm of X D^T is tr(D H D^T), so X is read once for all weights that read it. The bias, which
does not change, is left out of Y.

Shapes: O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from compressors.decoder_families import LinearGroup


@torch.no_grad()
def gram_matrices(
    module: nn.Module, groups: Sequence[LinearGroup], *, batches: Iterable[Tensor], run: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """X^T X [I, I] over all batches of the inputs X of each linear layer in `groups`, float32; shared in a group."""
    grams: dict[str, Tensor] = {}
    with ExitStack() as hooks:
        for group in groups:
            first = group.linears[0]
            handle = module.get_submodule(first).register_forward_pre_hook(partial(_add, grams, first))
            hooks.callback(handle.remove)
        for batch in batches:
            run(batch)
    return {linear: grams[group.linears[0]] for group in groups for linear in group.linears}


def relative_error(w_OI: Tensor, changed_OI: Tensor, *, gram_II: Tensor) -> float | None:
    """|X (W - W')^T| / |X W^T|; None where the output is 0."""
    whole = _squared_norm(w_OI, gram_II)
    return (_squared_norm(w_OI - changed_OI, gram_II) / whole) ** 0.5 if whole > 0 else None


def _squared_norm(w_OI: Tensor, gram_II: Tensor) -> float:
    """|X W^T|^2; rounding may make a tiny one negative, which is 0."""
    return max(0.0, float((w_OI @ gram_II).mul_(w_OI).sum(dtype=torch.float64)))


def _add(grams: dict[str, Tensor], name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    x_NI = inputs[0].reshape(-1, inputs[0].shape[-1]).float()
    if name not in grams:
        grams[name] = torch.zeros(x_NI.shape[1], x_NI.shape[1], device=x_NI.device)
    grams[name].addmm_(x_NI.T, x_NI)
