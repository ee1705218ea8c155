"""One decoder layer of a tiny random model as the algorithms of `quantize_weights` are given it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from compressors.decoder_families import DECODERS, LinearGroup
from compressors.integer_grid import IntegerGrid
from compressors.layer_algorithms import LayerOutcome, LayerWork, layer_output
from tests.compressors.decoders import random_decoder

WINDOWS, TOKENS = 12, 16


@dataclass(frozen=True, eq=False)
class InMemory:
    """Calibration windows [N, T, H]."""

    hidden_NTH: Tensor

    def __len__(self) -> int:
        return len(self.hidden_NTH)

    def batches(self, size: int) -> Iterator[Tensor]:
        return iter(self.hidden_NTH.split(size))

    def windows(self, indices: Tensor) -> Tensor:
        return self.hidden_NTH[indices]


def make_layer(
    model_type: str = "llama",
    *,
    grid: IntegerGrid | None = None,
    targets: Sequence[str] | None = None,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> LayerWork:
    """Layer 0 of a random model, its inputs with outlying channels; all linear layers are targets. Wanted is what it
    puts out itself.
    """
    model = random_decoder(model_type=model_type, **config).to(dtype).float().requires_grad_(False)
    family = DECODERS[model_type]
    module = model.get_submodule(family.layer(0))
    names = family.linears if targets is None else targets
    generator = torch.Generator().manual_seed(7)
    hidden_NTH = torch.randn(WINDOWS, TOKENS, model.config.hidden_size, generator=generator)
    hidden_NTH *= torch.exp(1.5 * torch.randn(model.config.hidden_size, generator=generator))
    positions = model.get_submodule(family.rotary)(hidden_NTH, torch.arange(TOKENS)[None])
    layer = LayerWork(
        name=family.layer(0),
        module=module,
        linears={name: module.get_submodule(name) for name in names},
        groups=tuple(_cut(family.groups, names)),
        inputs=InMemory(hidden_NTH),
        arguments={"position_embeddings": positions, "attention_mask": None},
        grid=grid or IntegerGrid(4, symmetric=True, group_size=32, scale_dtype=torch.float32),
        device=torch.device("cpu"),
        seed=3,
    )
    return replace(layer, wanted=InMemory(output(layer)))


def output(layer: LayerWork) -> Tensor:
    """The layer's outputs [N, T, H] on its calibration inputs, computed in float32 on every machine."""
    assert isinstance(layer.inputs, InMemory)
    with torch.no_grad():
        return layer_output(layer.module, layer.inputs.hidden_NTH, layer.arguments)


def relative_change(layer: LayerWork, tensors: dict[str, Tensor]) -> float:
    """How far the output moves when these tensors of the layer are replaced, as a share of the output's norm."""
    return float((output(with_tensors(layer, tensors)) - output(layer)).norm() / output(layer).norm())


def mean_loss(found_NTH: Tensor, wanted_NTH: Tensor) -> float:
    """The squared error of each window as a share of its squared norm, mean over all."""
    windows = zip(found_NTH, wanted_NTH, strict=True)
    losses = [float(((found_TH - wanted_TH).norm() / wanted_TH.norm()) ** 2) for found_TH, wanted_TH in windows]
    return sum(losses) / len(losses)


def with_tensors(layer: LayerWork, tensors: dict[str, Tensor]) -> LayerWork:
    """The layer with these tensors in their places; the layer given stays."""
    module: nn.Module = copy.deepcopy(layer.module)
    module.load_state_dict(tensors, strict=False)
    linears = {name: module.get_submodule(name) for name in layer.linears}
    return replace(layer, module=module, linears=linears)  # type: ignore[arg-type]


def stored(outcome: LayerOutcome) -> dict[str, Tensor]:
    """The tensors that an outcome puts in the layer's place, as the runtime computes them."""
    weights = {f"{name}.weight": weight.dequantized(torch.float32) for name, weight in outcome.weights.items()}
    return {**outcome.changed, **weights}


def _cut(groups: Sequence[LinearGroup], names: Sequence[str]) -> Iterator[LinearGroup]:
    for group in groups:
        linears = tuple(name for name in group.linears if name in names)
        if linears:
            yield LinearGroup(linears, group.source)
