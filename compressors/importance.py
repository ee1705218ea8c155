"""How much each FFN neuron matters to the model's answer.

Shapes: B examples, S tokens, N neurons of one layer, H hidden width, C classes. A neuron n is row n of `ffn_in`,
its bias, and column n of `ffn_out`. Scores are FP32 [N], one per layer, and compared within a layer only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from compressors.batches import Examples, collate, ordered_batches

BATCH_SIZE = 32
MAX_CLASSES = 4
"""Classes of each example that Taylor importance looks at, most probable first; each costs one backward pass."""

Pairs = Sequence[tuple[str, str]]


def magnitude(model: Any, pairs: Pairs) -> list[Tensor]:
    """Score of each neuron: the L2 norm of everything that it owns (Li et al. 2017, with L2 over the whole group)."""
    return [group_norm(model.get_submodule(ffn_in), model.get_submodule(ffn_out)) for ffn_in, ffn_out in pairs]


def group_norm(ffn_in: nn.Linear, ffn_out: nn.Linear) -> Tensor:
    """sqrt(|row|^2 + bias^2 + |column|^2), [N]."""
    squares_N = ffn_in.weight.detach().float().square().sum(1) + ffn_out.weight.detach().float().square().sum(0)
    if ffn_in.bias is not None:
        squares_N = squares_N + ffn_in.bias.detach().float().square()
    return squares_N.sqrt()


def taylor(model: Any, pairs: Pairs, examples: Examples, *, device: str = "cpu") -> list[Tensor]:
    """Score of each neuron: the expected squared first-order change of log p(label) when the neuron is removed.

    Molchanov et al. 2019 (eq. 8, at a gate of 1 on the neuron, per example), expected over the model's own label
    distribution, which makes it the Fisher pruning of Theis et al. 2018: half of it is the KL divergence that
    removing the neuron costs, to second order. It needs texts, no labels.
    """
    scores = [torch.zeros(model.get_submodule(ffn_out).in_features, device=device) for _, ffn_out in pairs]
    with _recorded_inputs([model.get_submodule(ffn_out) for _, ffn_out in pairs]) as activations_of:
        for rows in ordered_batches(examples, batch_size=BATCH_SIZE):
            logits_BC = model(**collate(examples, rows, device=device).inputs).logits.float()
            activations = activations_of()
            scores = [a + b for a, b in zip(scores, taylor_of_batch(logits_BC, activations), strict=True)]
    return [(total / len(examples)).cpu() for total in scores]


def taylor_of_batch(logits_BC: Tensor, activations: Sequence[Tensor]) -> list[Tensor]:
    """Sum over B and c of p_c (sum_S h dlog p_c / dh)^2 for each activation h, [B, S, N], behind `logits_BC`."""
    log_p_BC = logits_BC.log_softmax(-1)
    top_BK = log_p_BC.topk(min(MAX_CLASSES, log_p_BC.shape[-1])).indices
    scores = [torch.zeros_like(h[0, 0]) for h in activations]
    for k in range(top_BK.shape[1]):
        log_p_B = log_p_BC.gather(1, top_BK[:, k : k + 1]).squeeze(1)
        gradients = torch.autograd.grad(log_p_B.sum(), list(activations), retain_graph=True)
        for layer, (h_BSN, g_BSN) in enumerate(zip(activations, gradients, strict=True)):
            gate_BN = (h_BSN.detach() * g_BSN).sum(1)
            scores[layer] = scores[layer] + (log_p_B.detach().exp().unsqueeze(1) * gate_BN.square()).sum(0)
    return scores


@contextmanager
def _recorded_inputs(modules: Sequence[nn.Module]) -> Iterator[Callable[[], list[Tensor]]]:
    """Inside the block, the function given returns each module's newest input, still part of the graph."""
    newest: dict[int, Tensor] = {}

    def record(position: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            newest[position] = inputs[0]

        return hook

    handles = [module.register_forward_pre_hook(record(i)) for i, module in enumerate(modules)]
    try:
        yield lambda: [newest[i] for i in range(len(modules))]
    finally:
        for handle in handles:
            handle.remove()
