"""A base's tensors by the names that an adapter gives them, which need not be the names in its files.

transformers loads many checkpoints whose names lack a prefix, or have another one, than the loaded model's:
`h.0.attn.c_attn.weight` of a file is `transformer.h.0.attn.c_attn.weight` to PEFT. Names are compared exactly; then
from the numbered layer on, and where nothing is numbered without the first module of either.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from functools import cached_property

from compressors.model_layouts import RENAMED, SINGLE_EXPERT, is_conv1d, is_loaded
from service.fit import Facts
from service.intake.lora_tensors import Shape

HEADS = frozenset({"classifier", "qa_outputs", "score"})
"""Modules that PEFT trains for a task, and that a base without that task lacks."""
INPUT_TABLES = frozenset({"embed_in", "embed_tokens", "shared", "tok_embeddings", "word_embeddings", "wte"})
OUTPUT_TABLES = frozenset({"decoder", "embed_out", "lm_head", "output_projection"})
TABLES = INPUT_TABLES | OUTPUT_TABLES
"""Modules with a row for every token. Where two are tied, a file holds one of them."""


def is_of_head(name: str) -> bool:
    """Whether a tensor belongs to one of HEADS, at any depth."""
    return not HEADS.isdisjoint(name.split("."))


def leaf_of(name: str) -> str:
    """The last module of a tensor's name: `lm_head` of `model.lm_head.weight`."""
    return name.rpartition(".")[0].rpartition(".")[2]


class BaseTensors:
    """Built from a model's facts."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._tensors: Mapping[str, Shape] = facts["tensors"]

    @property
    def is_untied(self) -> bool:
        """The config says that head and embedding are two; where it says nothing, the architecture decides."""
        return self._facts["tie_word_embeddings"] is False

    @cached_property
    def tables(self) -> Mapping[str, Shape]:
        """Stored tables of tokens, as far as they are loaded."""
        tables = {name: shape for name, shape in self._tensors.items() if leaf_of(name) in TABLES and len(shape) == 2}
        return {name: shape for name, shape in tables.items() if self._is_loaded(name)}

    def candidates(self, name: str) -> tuple[str, ...]:
        """Stored names that `name` may mean. Empty: the base has no such tensor."""
        names = (name, *(name.replace(here, stored) for here, stored in RENAMED))
        return next(filter(None, map(self._stored_as, names)), ())

    def _stored_as(self, name: str) -> tuple[str, ...]:
        if name in self._tensors:
            return (name,)
        layer = _from_layer(name)
        if layer:
            return tuple(self._by_layer.get(layer, ()))
        bare = _without_first(name)
        return (bare,) if bare in self._tensors else tuple(self._by_bare_name.get(name, ()))

    def shape(self, name: str) -> Shape | None:
        """The shape of the one tensor that `name` means; None where there are several, or the weight is packed."""
        found = self.candidates(name)
        if len(found) != 1 or f"{found[0]}.absmax" in self._tensors:
            return None
        return list(self._tensors[found[0]])

    def smaller_tables(self, grown: Collection[str]) -> Mapping[str, Shape]:
        """Tables that have as many rows as those that `grown` names, and are none of them."""
        meant = {stored for name in grown for stored in self.candidates(name)}
        rows = {self._tensors[stored][0] for stored in meant}
        return {name: shape for name, shape in self.tables.items() if name not in meant and shape[0] in rows}

    def may_be_tied(self, name: str) -> bool:
        """Whether a tensor that is not stored may be another one's double, or be tied to one."""
        return leaf_of(name) in TABLES and not self.is_untied

    def is_outgrown(self, name: str, shape: Shape) -> bool:
        """Whether the base's table of this name has fewer rows, and as many columns."""
        found = self.shape(name)
        return leaf_of(name) in TABLES and found is not None and found[1:] == shape[1:] and found[:1] < shape[:1]

    def is_conv1d(self, module: str) -> bool:
        """Whether the module's weight is stored as [in, out]."""
        return is_conv1d(module, self._facts["model_type"])

    @cached_property
    def modules(self) -> frozenset[str]:
        """Modules that have a tensor of their own."""
        return frozenset(name.rpartition(".")[0] for name in self._tensors)

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """Modules with a weight of two dimensions, as far as they are loaded; experts are left out, which transformers
        fuses.
        """
        weights = (name for name, shape in self._tensors.items() if name.endswith(".weight") and len(shape) == 2)
        loaded = (name for name in weights if not SINGLE_EXPERT.search(name) and self._is_loaded(name))
        return tuple(name.removesuffix(".weight") for name in loaded)

    def _is_loaded(self, name: str) -> bool:
        return is_loaded(name, self._facts["layers"])

    @cached_property
    def _by_layer(self) -> Mapping[str, list[str]]:
        return _grouped({name: _from_layer(name) for name in self._tensors})

    @cached_property
    def _by_bare_name(self) -> Mapping[str, list[str]]:
        return _grouped({name: _without_first(name) for name in self._tensors if not _from_layer(name)})


def _grouped(keys: Mapping[str, str]) -> Mapping[str, list[str]]:
    """Names by their key; those with an empty one are left out."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name, key in keys.items():
        if key:
            groups[key].append(name)
    return groups


def _from_layer(name: str) -> str:
    """`layers.0.mlp.fc.weight` of `model.layers.0.mlp.fc.weight`; empty where nothing is numbered."""
    parts = name.split(".")
    numbered = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    return "" if numbered is None else ".".join(parts[max(numbered - 1, 0) :])


def _without_first(name: str) -> str:
    """`wte.weight` of `transformer.wte.weight`; empty where no module would be left."""
    rest = name.partition(".")[2]
    return rest if "." in rest else ""
