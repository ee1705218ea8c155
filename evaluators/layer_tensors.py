"""The tensors inside PEFT's layers: their names, and how a layer without memory gets its values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from evaluators.stored_weights import NotComparable

PREFIX = "base_model.model."
WRAPPERS = ("base_layer", "original_module", "token_adapter")
ONLY_TO_UNMERGE = "trainable_tokens_original"


def memory_name(key: str) -> str:
    """The name that transformers has for what PEFT calls `key`."""
    parts = [part for part in key.removeprefix(PREFIX).split(".") if part not in WRAPPERS]
    if "modules_to_save" in parts:
        at = parts.index("modules_to_save")
        del parts[at : at + 2]
    return ".".join(parts)


def tensors_of(module: Any) -> list[tuple[str, Tensor]]:
    """Parameters and buffers by name, those that are shared under each of their names."""
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def put(module: Any, name: str, value: Tensor, *, device: str) -> None:
    """Replace one tensor of `module`; floats become FP32."""
    owner, _, leaf = name.rpartition(".")
    holder = module.get_submodule(owner)
    filled = value.to(device=device, dtype=torch.float32 if value.is_floating_point() else None)
    if leaf in holder._parameters:
        holder._parameters[leaf] = nn.Parameter(filled, requires_grad=False)
    else:
        holder._buffers[leaf] = filled


def refuse_empty(layer: Any) -> None:
    """NotComparable where a tensor of the layer got no value."""
    left = [name for name, tensor in tensors_of(layer) if tensor.is_meta and not name.startswith(ONLY_TO_UNMERGE)]
    if left:
        raise NotComparable(f"PEFT loads {left[0]!r} of this layer from no file")


def with_constants(layer: Any) -> Any:
    """`layer` with the tensors that are stored nowhere because the code derives them from numbers."""
    for part in layer.modules():
        if hasattr(part, "scalar_embed_scale"):
            part.embed_scale = torch.tensor(part.scalar_embed_scale)
    for label in getattr(layer, "ranknum", {}):
        layer.ranknum[label] = nn.Parameter(torch.tensor(float(layer.r[label])), requires_grad=False)
    return layer
