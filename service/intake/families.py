"""The families of classifiers that are taken in: what a config must say and which tensors its weights must have.

A literal table, torch-free; it holds the families of `compressors.families`, and a test compares the two.
transformers initialises a missing tensor at random and passes over an unknown one: here both are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from compressors.decoder_families import DECODERS
from modelpress.errors import InvalidModel

Shapes = Mapping[str, tuple[int, ...]]

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 24
MIN_POSITIONS = 8
"""Graphs are traced on inputs of 8 tokens."""


@dataclass(frozen=True)
class Dimensions:
    """A config's sizes, each an integer >= 1. `max_positions` is the longest input in tokens."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    ffn: int
    max_positions: int
    token_types: int


@dataclass(frozen=True)
class Architecture:
    """`shapes(dimensions, number of labels)` are the tensors that the weights must have; `buffers` may be there too."""

    task: str
    shapes: Callable[[Dimensions, int], Shapes]
    buffers: frozenset[str]


def bert_for_sequence_classification(d: Dimensions, labels: int) -> dict[str, tuple[int, ...]]:
    """BERT (Devlin et al. 2018) with pooler and classifier, as transformers names it. Linear weights are [out, in]."""
    shapes = _norm("bert.embeddings.LayerNorm", d.hidden)
    for name, rows in (("word", d.vocabulary), ("position", d.max_positions), ("token_type", d.token_types)):
        shapes[f"bert.embeddings.{name}_embeddings.weight"] = (rows, d.hidden)
    for i in range(d.layers):
        layer = f"bert.encoder.layer.{i}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= _linear(f"{layer}.attention.{name}", d.hidden, d.hidden)
        shapes |= _norm(f"{layer}.attention.output.LayerNorm", d.hidden)
        shapes |= _linear(f"{layer}.intermediate.dense", d.ffn, d.hidden)
        shapes |= _linear(f"{layer}.output.dense", d.hidden, d.ffn)
        shapes |= _norm(f"{layer}.output.LayerNorm", d.hidden)
    return shapes | _linear("bert.pooler.dense", d.hidden, d.hidden) | _linear("classifier", labels, d.hidden)


SUPPORTED: Mapping[str, Mapping[str, Architecture]] = {
    "bert": {
        "BertForSequenceClassification": Architecture(
            task="text-classification",
            shapes=bert_for_sequence_classification,
            buffers=frozenset({"bert.embeddings.position_ids", "bert.embeddings.token_type_ids"}),
        )
    }
}
"""config's model_type -> class under `architectures` -> what it must have."""


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """The row of SUPPORTED that a config.json names; InvalidModel names what was found and what is known."""
    kind, classes = config.get("model_type"), config.get("architectures")
    if not isinstance(kind, str) or kind not in SUPPORTED:
        unknown("model_type", kind, ", ".join((*SUPPORTED, *DECODERS)))
    known = SUPPORTED[kind]
    if not isinstance(classes, list) or len(classes) != 1 or not isinstance(classes[0], str) or classes[0] not in known:
        unknown("architectures", classes, ", ".join(f'["{name}"]' for name in known))
    return known[classes[0]]


def dimensions_of(config: Mapping[str, Any]) -> Dimensions:
    """The sizes in a config.json of the BERT family; InvalidModel names the field that cannot be."""
    hidden, heads = size_of(config, "hidden_size"), size_of(config, "num_attention_heads")
    if hidden % heads:
        _impossible("num_attention_heads", f"{heads}, which does not divide hidden_size {hidden}")
    return Dimensions(
        vocabulary=size_of(config, "vocab_size"),
        hidden=hidden,
        layers=size_of(config, "num_hidden_layers", MAX_LAYERS),
        heads=heads,
        ffn=size_of(config, "intermediate_size"),
        max_positions=size_of(config, "max_position_embeddings", least=MIN_POSITIONS),
        token_types=size_of(config, "type_vocab_size"),
    )


def _linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def size_of(config: Mapping[str, Any], field: str, largest: int = MAX_WIDTH, least: int = 1) -> int:
    """An integer from `least` to `largest`; InvalidModel else."""
    value = config.get(field)
    if type(value) is not int or not least <= value <= largest:
        _impossible(field, f"{value!r}"[:80] + f": it must be an integer from {least} to {largest}")
    return value


def _impossible(field: str, what: str) -> NoReturn:
    raise InvalidModel(f"config.json: {field} is {what}", reason="BAD_CONFIG", field=field)


def unknown(field: str, found: object, known: str) -> NoReturn:
    """Refuse a type or class that no stage knows."""
    raise InvalidModel(
        f"config.json: {field} {str(found)[:120]!r} is not supported; known: {known}",
        reason="UNKNOWN_ARCHITECTURE",
        field=field,
    )
