"""LoRA on a layer: the factors on its weight, DoRA's magnitude, and the bias of lora_B, as edits.

Shapes: O outputs, I inputs, R rank, V tokens, K a convolution's kernel. The layer's real layout counts, whatever the
adapter's `fan_in_fan_out` says: linear [O, I], transformers' Conv1D [I, O], embeddings [V, O], convolutions
[O, I, K...].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from compressors.adapter_fit import Fit
from compressors.edits import Dora, Edit, LowRank, Shift, TransposedLowRank
from compressors.weight_files import StoredTensor

Parts = Mapping[str, StoredTensor]
"""Tensors of one module by their part: `lora_A.weight`, `lora_embedding_B`, ..."""


def layer_edits(fit: Fit, module: str, parts: Parts) -> Iterator[tuple[str, Edit]]:
    """The edits of one adapted layer, by parameter; InvalidModel names what is missing or does not fit."""
    key, halves = fit.tensors.key(module), _halves(parts)
    for part in (*halves, *(["lora_B.bias"] if fit.settings.lora_bias else [])):
        if part not in parts:
            fit.fail(f"{key}.{part}", "is missing: half of the adapter is not there; save it again with PEFT")
    if "lora_B.bias" in parts and not fit.settings.lora_bias:
        fit.fail(f"{key}.lora_B.bias", "contradicts lora_bias false: the configuration is another adapter's")
    if not fit.is_targeted(module):
        fit.fail(f"{key}.{halves[0]}", "is on a module outside target_modules: the configuration is another adapter's")
    low_rank = _low_rank(fit, module, parts[halves[0]], parts[halves[1]])
    yield f"{module}.weight", _directed(fit, module, parts, low_rank)
    if fit.settings.lora_bias:
        yield f"{module}.bias", _shift(fit, module, parts["lora_B.bias"], low_rank.scaling)


def _halves(parts: Parts) -> tuple[str, str]:
    is_embedding = any(part.startswith("lora_embedding") for part in parts)
    return ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A.weight", "lora_B.weight")


def _low_rank(fit: Fit, module: str, a: StoredTensor, b: StoredTensor) -> LowRank:
    """The factors as the layer's own kind has them."""
    weight = f"{module}.weight"
    target = weight if fit.is_target_parameter(weight) else module
    rank, shape = fit.settings.rank_of(target), fit.shape_of(weight, asked_by=a)
    if len(shape) < 2:
        fit.fail(a.name, f"is on {module!r}, whose weight has shape {list(shape)}: it is no layer for LoRA")
    transposed = "lora_embedding" in a.name or fit.base.is_conv1d(module)
    outputs, inputs = (shape[1], shape[:1]) if transposed else (shape[0], shape[1:])
    _refuse_groups(fit, module, a, shape)
    fit.check_shape(a, (rank, *inputs), f"rank {rank}, weight {list(shape)}")
    fit.check_shape(b, (outputs, rank, *[1] * (len(inputs) - 1)), f"rank {rank}, weight {list(shape)}")
    kind = TransposedLowRank if transposed else LowRank
    return kind(fit.load(a), fit.load(b), fit.settings.scaling_of(target), rank, fit.products)


def _refuse_groups(fit: Fit, module: str, a: StoredTensor, shape: tuple[int, ...]) -> None:
    """A convolution in groups cannot hold B @ A, which joins every input with every output."""
    if len(shape) > 2 and len(a.shape) == len(shape) and a.shape[1] != shape[1] and a.shape[2:] == shape[2:]:
        fit.fail(
            a.name,
            f"has shape {list(a.shape)} and is on {module!r}, a convolution in groups with weight {list(shape)}, which "
            f"cannot hold a change of {a.shape[1]} input channels: train the adapter without this module",
        )


def _directed(fit: Fit, module: str, parts: Parts, low_rank: LowRank) -> Edit:
    """With DoRA's magnitude where the adapter is of that kind."""
    magnitude = next((stored for part, stored in parts.items() if part.startswith("lora_magnitude_vector")), None)
    if magnitude is None:
        if fit.settings.use_dora:
            fit.fail(f"{fit.tensors.key(module)}.lora_magnitude_vector", "is missing, and use_dora needs it")
        return low_rank
    if not fit.settings.use_dora:
        fit.fail(magnitude.name, "contradicts use_dora false: the configuration is another adapter's")
    shape, output_dim = (
        fit.shape_of(f"{module}.weight", asked_by=magnitude),
        int(isinstance(low_rank, TransposedLowRank)),
    )
    if magnitude.elements != shape[output_dim]:
        fit.fail(magnitude.name, f"has shape {list(magnitude.shape)}, expected {shape[output_dim]} values")
    return Dora(low_rank, fit.load(magnitude), output_dim)


def _shift(fit: Fit, module: str, stored: StoredTensor, scaling: float) -> Shift:
    bias = fit.base.find(f"{module}.bias")
    if bias is None:
        fit.fail(stored.name, f"needs a bias of {module!r} to add to, and the base has none: train without lora_bias")
    fit.check_shape(stored, bias.shape, "the base layer's bias")
    return Shift(fit.load(stored), scaling)
