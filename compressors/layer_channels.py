"""The channels that flow into the linear layers of one decoder layer: what they hold, and moving scales along them.

Glue between `LayerWork` and the mathematics of AWQ and SmoothQuant. Shapes: I input channels, N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compressors.channel_scaling import linear_scales, norm_scales
from compressors.layer_algorithms import LayerInputs, LayerWork

BATCH_WINDOWS = 8

Look = Callable[[Tensor], None]


@dataclass(frozen=True, eq=False)
class Channels:
    """The output channels of `source`, which are the input channels of the linear layers `readers` and nothing else's.

    Names are those inside the decoder layer. `readers` hold also linear layers that are no targets.
    """

    source: str
    readers: tuple[str, ...]


def calibration_inputs(layer: LayerWork) -> LayerInputs:
    """The layer's inputs; ValueError where the stage read no calibration texts, which no recipe comes to."""
    if layer.inputs is None:
        raise ValueError(f"{layer.name} has no calibration inputs: this algorithm needs them")
    return layer.inputs


def look_at_inputs(layer: LayerWork, looks: Mapping[str, Look]) -> None:
    """Run the layer over its calibration inputs and show each look what flows into its linear layer, as [N, I] in
    float32."""
    with ExitStack() as hooks, torch.no_grad():
        for name, look in looks.items():
            handle = layer.linears[name].register_forward_pre_hook(partial(_show, look))
            hooks.callback(handle.remove)
        for hidden_BTH in calibration_inputs(layer).batches(BATCH_WINDOWS):
            layer.run(hidden_BTH)


def scalable_channels(layer: LayerWork) -> dict[str, Channels]:
    """By the name of each group's first linear layer, where scales of its input channels can be moved.

    They cannot where nothing makes that input channel by channel, or where one channel of the source becomes several,
    as those of `v_proj` do with grouped queries.
    """
    shared = _readers_of_one_input(layer)
    found = {}
    for group in layer.groups:
        first = group.linears[0]
        if group.source is None:
            continue
        width = layer.module.get_parameter(f"{group.source}.weight").shape[0]
        if width == layer.linears[first].in_features:
            found[first] = Channels(group.source, shared[first])
    return found


def possible_scales(layer: LayerWork, channels: Channels, scales_I: Tensor) -> Tensor:
    """The scales nearest to those asked for that can be moved without rounding the source."""
    source = layer.module.get_submodule(channels.source)
    if isinstance(source, nn.Linear):
        return linear_scales(scales_I)
    return norm_scales(layer.module.get_parameter(f"{channels.source}.weight"), scales_I)[1]


def move_scales(layer: LayerWork, channels: Channels, scales_I: Tensor) -> frozenset[str]:
    """Divide the source's channels by `possible_scales` and multiply its readers' by them: the function stays.

    Changes `layer.module` and returns the names of the tensors that changed.
    """
    source = layer.module.get_submodule(channels.source)
    owned = dict(source.named_parameters())
    with torch.no_grad():
        if isinstance(source, nn.Linear):
            for tensor in owned.values():
                tensor.div_(scales_I[:, None] if tensor.dim() == 2 else scales_I)
        else:
            owned["weight"].copy_(norm_scales(owned["weight"], scales_I)[0])
        for reader in channels.readers:
            layer.module.get_parameter(f"{reader}.weight").mul_(scales_I)
    readers = {f"{reader}.weight" for reader in channels.readers}
    return frozenset(f"{channels.source}.{name}" for name in owned) | readers


def tensors_of(layer: LayerWork, names: Iterable[str]) -> dict[str, Tensor]:
    """Copies of these tensors of the layer, in order of their names."""
    return {name: layer.module.get_parameter(name).detach().clone() for name in sorted(names)}


def _readers_of_one_input(layer: LayerWork) -> dict[str, tuple[str, ...]]:
    """For every linear layer the names of those that are given the very same tensor, itself included."""
    seen: dict[str, Tensor] = {}
    linears = {name: module for name, module in layer.module.named_modules() if isinstance(module, nn.Linear)}
    with ExitStack() as hooks, torch.no_grad():
        for name, linear in linears.items():
            hooks.callback(linear.register_forward_pre_hook(partial(_note, seen, name)).remove)
        layer.run(calibration_inputs(layer).windows(torch.tensor([0])))
    return {name: tuple(other for other in linears if seen.get(other) is seen[name]) for name in seen}


def _show(look: Look, module: nn.Module, arguments: tuple[Any, ...]) -> None:
    look(arguments[0].reshape(-1, arguments[0].shape[-1]).float())


def _note(seen: dict[str, Tensor], name: str, module: nn.Module, arguments: tuple[Any, ...]) -> None:
    seen[name] = arguments[0]
