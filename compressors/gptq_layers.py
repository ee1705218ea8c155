"""GPTQ on one decoder layer: one pass over the calibration inputs gives the Hessian of every group of linear layers.

Linear layers that read the same input share its Hessian, so their weights are stacked and solved as one. What a group
reads is what the layer computes before anything of it is rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial

import torch
from torch import Tensor, nn

from compressors.decoder_families import LinearGroup
from compressors.gptq import SingularHessian
from compressors.gptq_solution import Solution, solve, split_rows
from compressors.hessians import HessianSum
from compressors.layer_algorithms import LayerOutcome, LayerWork
from compressors.layer_channels import BATCH_WINDOWS, calibration_inputs
from compressors.rtn import chosen_rounding
from compressors.weight_layouts import AnyWeight
from modelpress.errors import InvalidModel
from modelpress.quantization_recipes import QuantizeWeights


def quantize_layer(layer: LayerWork, arguments: QuantizeWeights) -> LayerOutcome:
    """Every linear layer of `layer`. A group whose Hessian tells nothing is rounded, and `fallbacks` say so.

    The details hold, by each group's first linear layer and only where there is something to say, its dead input
    channels, the damping that its Hessian needed, and the rows that plain rounding does better. Raises InvalidModel
    where what a linear layer reads is not finite.
    """
    weights: dict[str, AnyWeight] = {}
    fallbacks: dict[str, str] = {}
    details: dict[str, float] = {}
    for group, h_II in _hessians(layer):
        first = group.linears[0]
        if dead := int((h_II.diagonal() == 0).sum()):
            details[f"dead inputs of {first}"] = float(dead)
        stacked_OI = torch.cat([layer.linears[name].weight.detach() for name in group.linears])
        try:
            solution = solve(stacked_OI, h_II, grid=layer.grid, arguments=arguments)
        except SingularHessian as fault:
            rounding = chosen_rounding(layer.grid, arguments)
            weights |= {name: rounding(layer.linears[name].weight.detach()) for name in group.linears}
            fallbacks |= dict.fromkeys(group.linears, f"rounded to nearest: {fault}")
            continue
        rows = {name: layer.linears[name].out_features for name in group.linears}
        weights |= split_rows(solution.weight, rows)
        details |= _notable(first, solution, arguments)
    return LayerOutcome(weights, fallbacks=fallbacks, details=details)


def _hessians(layer: LayerWork) -> Iterator[tuple[LinearGroup, Tensor]]:
    """Each group's, from one pass over the calibration inputs."""
    watch = _Watch(layer)
    for group in layer.groups:
        h_II = watch.sums.pop(group.linears[0]).mean()
        if not bool(h_II.isfinite().all()):
            name = f"{layer.name}.{group.linears[0]}"
            raise InvalidModel(
                f"the inputs of {name} are NaN or too large to be squared, and what the decoder layer reads is finite: "
                "a weight of the layer is too large, or damaged",
                reason="NON_FINITE",
                field=name,
            )
        yield group, h_II


class _AllSeen(Exception):
    """Every group has its input of this batch: what the layer computes from there on is not needed."""


class _Watch:
    """The Hessian of every group by its first linear layer, summed over all calibration inputs once built."""

    def __init__(self, layer: LayerWork) -> None:
        firsts = [group.linears[0] for group in layer.groups]
        self.sums = {first: HessianSum(layer.linears[first].in_features, device=layer.device) for first in firsts}
        self._waiting: set[str] = set()
        with ExitStack() as hooks, torch.no_grad():
            for first in firsts:
                handle = layer.linears[first].register_forward_pre_hook(partial(self._see, first))
                hooks.callback(handle.remove)
            for hidden_BTH in calibration_inputs(layer).batches(BATCH_WINDOWS):
                self._waiting.update(firsts)
                with suppress(_AllSeen):
                    layer.run(hidden_BTH)

    def _see(self, first: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.sums[first].add(inputs[0].reshape(-1, inputs[0].shape[-1]))
        self._waiting.discard(first)
        if not self._waiting:
            raise _AllSeen


def _notable(first: str, solution: Solution, arguments: QuantizeWeights) -> dict[str, float]:
    """What of a solution was not as the recipe says."""
    figures = {}
    if solution.damping != arguments.damping:
        figures[f"damping of {first}"] = solution.damping
    if solution.rounded_rows:
        figures[f"rounded rows of {first}"] = float(solution.rounded_rows)
    return figures
