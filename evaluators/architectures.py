"""transformers' own view of a stored model: its class on the meta device, and where each parameter is stored.

Names and layouts in memory are not those in the files: fused experts are stored one by one, a head may be tied to the
embeddings, a prefix may be missing. transformers' conversion tables decide; only the tensors asked for are read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from evaluators.bitsandbytes_weights import DequantizedWeights
from evaluators.stored_weights import NotComparable, StoredWeights
from modelpress.errors import InvalidModel

NOT_READ = (
    "auto_map",
    "_name_or_path",
    "quantization_config",
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "_experts_implementation",
)
"""Fields of a config.json that would pick code or another arithmetic than plain FP32."""
MOST: Mapping[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers"), 10_000),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_local_experts", "num_experts"), 10_000),
    "num_labels": 1_000_000,
}


def model_class(config: Mapping[str, Any]) -> Any:
    """The class that `architectures` names, if transformers has it under the config's `model_type`.

    A name is only compared with transformers' tables: nothing else can be reached by it. NotComparable for others.
    """
    model_type, names = config.get("model_type"), config.get("architectures") or [None]
    known = {
        name
        for table, entries in vars(modeling_auto).items()
        if table.startswith("MODEL_") and table.endswith("_MAPPING_NAMES")
        for name in _names(entries.get(model_type))
    }
    if model_type not in CONFIG_MAPPING or names[0] not in known:
        raise NotComparable(
            f"transformers {transformers.__version__} has no class {str(names[0])[:80]!r} for the model_type "
            f"{str(model_type)[:80]!r}"
        )
    return getattr(transformers, names[0])


def model_config(config: Mapping[str, Any]) -> Any:
    """The config object, with eager attention and nothing that names code.

    NotComparable for sizes that no model has: transformers would make as many modules or labels before it failed.
    """
    for name, most in MOST.items():
        value = config.get(name)
        if isinstance(value, int) and value > most:
            raise NotComparable(f"config.json names {name} {value}, and no more than {most} are made")
    plain = {name: value for name, value in config.items() if name not in NOT_READ}
    read = CONFIG_MAPPING[config["model_type"]].from_dict(plain)
    read._attn_implementation = "eager"
    return read


def empty_model(config: Mapping[str, Any]) -> Any:
    """The model that the config names, on the meta device: no tensor takes memory."""
    architecture, settings = model_class(config), model_config(config)
    with torch.device("meta"):
        return architecture(settings).eval()


@dataclass(frozen=True)
class Origin:
    """What a parameter is made of: `parts` are (source pattern, stored name); `first` names its converter's result."""

    first: str
    parts: tuple[tuple[str, str], ...]
    converter: Any = None


@dataclass(frozen=True)
class StoredParameters:
    """`model` is on the meta device; `origins` says which stored tensors make which of its parameters.

    `shapes` are those of its parameters and buffers; PEFT may wrap its modules afterwards.
    """

    weights: StoredWeights | DequantizedWeights
    model: Any
    shapes: Mapping[str, tuple[int, ...]]
    origins: Mapping[str, Origin]
    tied: Mapping[str, str]
    """Parameter -> the parameter that it shares its tensor with, where the config ties them."""

    @classmethod
    def of(cls, weights: StoredWeights | DequantizedWeights, model: Any) -> StoredParameters:
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        return cls(weights, model, shapes, _origins(model, weights.tensors), dict(model.all_tied_weights_keys))

    def holder(self, name: str) -> str | None:
        """The parameter whose stored tensors `name` is read from: itself, what it is tied to, or None."""
        return next((held for held in (name, *sorted(self.partners(name))) if held in self.origins), None)

    def has(self, name: str) -> bool:
        """Whether the stored tensors make this parameter, in its shape."""
        held = self.holder(name)
        if held is None or self.origins[held].converter is not None:
            return held is not None
        return self.weights.tensors[self.origins[held].parts[0][1]].shape == self.shapes[name]

    def partners(self, name: str) -> set[str]:
        """Other parameters that are the same tensor in memory."""
        source = self.tied.get(name, name)
        return {source, *(target for target, of in self.tied.items() if of == source)} - {name}

    def load(self, name: str) -> Tensor:
        """The parameter in its stored dtype, on the CPU; its shape is the architecture's."""
        held = self._held(name)
        origin = self.origins[held]
        tensor = self.weights.load(origin.parts[0][1]) if origin.converter is None else self._convert(origin, held)
        if tuple(tensor.shape) != self.shapes[name]:
            raise InvalidModel(
                f"{origin.parts[0][1]!r} makes {name!r} of shape {list(tensor.shape)}, the config says "
                f"{list(self.shapes[name])}: the weights and config.json are not of one model",
                field=name,
            )
        return tensor

    def _held(self, name: str) -> str:
        held = self.holder(name)
        if held is None:
            raise NotComparable(f"{name!r} is stored nowhere in the model")
        return held

    def _convert(self, origin: Origin, name: str) -> Tensor:
        converter = copy.deepcopy(origin.converter)
        for pattern, stored in origin.parts:
            converter.add_tensor(origin.first, stored, pattern, partial(self.weights.load, stored))
        value = converter.convert(origin.first, model=self.model, config=self.model.config)[name]
        tensor: Tensor = value[0] if isinstance(value, list) else value
        return tensor


def match_vocabulary(model: Any, target: Any) -> None:
    """Give embeddings and head of `model` as many rows as `target` has; new ones have no values of their own."""
    rows = vocabulary(target)
    if rows is not None and rows != vocabulary(model):
        model.resize_token_embeddings(rows, mean_resizing=False)


def vocabulary(model: Any) -> int | None:
    """Rows of the input embeddings; None for a model that takes no token ids."""
    try:
        embeddings = model.get_input_embeddings()
    except NotImplementedError:
        return None
    return getattr(embeddings, "num_embeddings", None)


def _origins(model: Any, names: Iterable[str]) -> dict[str, Origin]:
    """As transformers assigns a checkpoint's tensors on loading; stored tensors that it ignores are left out."""
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    parts: dict[str, list[tuple[str, str]]] = {}
    used: dict[str, Any] = {}
    for stored in sorted(names, key=dot_natural_key):
        name, pattern = rename_source_key(stored, renamings, converters, prefix, state)
        if name not in state and stored in state:
            name, pattern = rename_source_key(stored, [], [], prefix, state)
        if name in state:
            parts.setdefault(name, []).append((pattern or stored, stored))
            used[name] = by_pattern.get(pattern)
    return {
        target: Origin(name, tuple(pieces), used[name])
        for name, pieces in parts.items()
        for target in _targets(name, used[name])
    }


def _targets(name: str, converter: Any) -> list[str]:
    if converter is None:
        return [name]
    first, *others = converter.target_patterns
    return [name, *(name.replace(first, other) for other in others)]


def _names(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())
