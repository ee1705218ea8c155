"""Where a base model keeps what an adapter names: layouts, fused experts, tied tensors. No model is made for it.

Adapters use the names of the loaded model. Most are those of the files; fused experts may be stored one by one, and a
head that is tied to the embeddings is not stored at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from compressors.dequantized_base import DequantizedBase
from compressors.model_layouts import RENAMED, STORED_EXPERTS, TRANSPOSED_EXPERTS, is_conv1d
from compressors.weight_files import StoredTensor, WeightFiles
from modelpress.errors import InvalidModel


@dataclass(frozen=True)
class Fused:
    """One parameter that the files hold in parts: `parts[expert]` are the stored tensors that it is stacked from."""

    parts: tuple[tuple[StoredTensor, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """As in the loaded model: [experts, rows of all parts, columns]."""
        return (len(self.parts), sum(part.shape[0] for part in self.parts[0]), self.parts[0][0].shape[1])


@dataclass(frozen=True)
class BaseLayout:
    """The base's config and stored tensors, asked by the names of the loaded model."""

    config: Mapping[str, Any]
    files: WeightFiles | DequantizedBase

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """By their names in the files."""
        return self.files.tensors

    def find(self, name: str) -> StoredTensor | None:
        """The stored tensor of that parameter: its own, or the one that it is tied to."""
        names = (name, *(name.replace(here, stored) for here, stored in RENAMED), self._without_prefix(name))
        found = next((self.tensors[each] for each in names if each in self.tensors), None)
        if found is not None or not is_outside_layers(name):
            return found
        source = self.tied.get(name, "")
        return self.tensors.get(source) or self.tensors.get(self._without_prefix(source))

    def prefix_of(self, name: str) -> str:
        """What the loaded model puts before the names of the files, e.g. `transformer.` for a GPT-2 that was saved
        without its head; empty where `name` is stored as it is, or not at all.
        """
        rest = self._without_prefix(name)
        return "" if name in self.tensors or rest not in self.tensors else name.removesuffix(rest)

    def _without_prefix(self, name: str) -> str:
        """The name that the model without its head gives the parameter; empty for a parameter of the head."""
        prefix, _, rest = name.partition(".")
        if rest not in self.tensors or self.model_class is None:
            return ""
        return rest if prefix == self.model_class.base_model_prefix else ""

    def find_fused(self, name: str) -> Fused | None:
        """The parts of a fused parameter that is stored expert by expert."""
        for end, layouts in STORED_EXPERTS.items():
            if name.endswith(end):
                prefix = name.removesuffix(end)
                found = (self._parts(tuple(prefix + part for part in layout)) for layout in layouts)
                return next((Fused(parts) for parts in found if parts), None)
        return None

    def is_conv1d(self, module: str) -> bool:
        """Whether the module's weight is stored as [in, out]."""
        return is_conv1d(module, self.model_type)

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type"))

    @property
    def has_transposed_experts(self) -> bool:
        return self.model_type in TRANSPOSED_EXPERTS

    @cached_property
    def vocabulary(self) -> int | None:
        """Tokens, as the config says."""
        text = self.config.get("text_config")
        size = self.config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
        return size if type(size) is int else None

    @cached_property
    def may_be_tied(self) -> Mapping[str, str]:
        """Parameters that the model's class, or the model inside it, can tie, and what to: e.g. lm_head.weight to the
        embeddings, and the embeddings of BART's encoder and decoder to those that they share.
        """
        from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES as INNER

        inner = _as_tuple(INNER.get(self.model_type))
        if self.model_class is None or not inner:
            return _tied_keys(self.model_class)
        prefix = f"{self.model_class.base_model_prefix}."
        of_inner = _tied_keys(_transformers_class(inner[0]))
        nested = {f"{prefix}{target}": f"{prefix}{source}" for target, source in of_inner.items()}
        return nested | _tied_keys(self.model_class)

    @cached_property
    def tied(self) -> Mapping[str, str]:
        """Of those, the ones that are tied in this model: moving one in place would move the other."""
        return self.may_be_tied if self.ties_embeddings else {}

    @cached_property
    def ties_embeddings(self) -> bool:
        said = self.config.get("tie_word_embeddings")
        if said is None and self.model_class is not None:
            said = getattr(self.model_class.config_class(), "tie_word_embeddings", False)
        return bool(said)

    @cached_property
    def model_class(self) -> Any:
        """transformers' class of the model; None where it has none of that name for this type. No model is made."""
        from transformers.models.auto import modeling_auto

        names = self.config.get("architectures")
        first = names[0] if isinstance(names, list) and names else None
        known = {
            name
            for table, entries in vars(modeling_auto).items()
            if table.endswith("_MAPPING_NAMES")
            for name in _as_tuple(entries.get(self.model_type))
        }
        return _transformers_class(first) if isinstance(first, str) and first in known else None

    @cached_property
    def classifier_class(self) -> Any:
        """The class of the same type that classifies whole sequences; InvalidModel where there is none."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as KNOWN

        name = KNOWN.get(self.model_type)
        if name is None:
            raise InvalidModel(f"model_type {self.model_type!r} has no class for sequence classification: use its base")
        return _transformers_class(name)

    def _parts(self, patterns: tuple[str, ...]) -> tuple[tuple[StoredTensor, ...], ...]:
        experts: list[tuple[StoredTensor, ...]] = []
        while all(pattern.format(len(experts)) in self.tensors for pattern in patterns):
            experts.append(tuple(self.tensors[pattern.format(len(experts))] for pattern in patterns))
        return tuple(experts)


def is_outside_layers(name: str) -> bool:
    """Whether a parameter belongs to no numbered layer, as heads and embeddings do: only such are ever tied."""
    return not any(part.isdecimal() for part in name.split("."))


def _tied_keys(model_class: Any) -> dict[str, str]:
    names = getattr(model_class, "_tied_weights_keys", None)
    return dict(names) if isinstance(names, dict) else {}


def _as_tuple(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names or ())


def _transformers_class(name: str) -> Any:
    import transformers

    return getattr(transformers, name)
