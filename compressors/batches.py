"""Texts to token ids to padded batches, in an order that a seed decides.

Shapes: B examples, S tokens of the longest example of a batch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from modelpress.datasets import LabelledTexts
from modelpress.errors import InvalidDataset, InvalidModel

INPUT_ORDER = ("input_ids", "attention_mask", "token_type_ids")
NO_LABEL = -100
"""torch's own mark for rows that a cross entropy leaves out."""
WINDOW_BATCHES = 20
"""Rows are sorted by length within windows of so many batches: little padding, still well mixed."""


@dataclass(frozen=True)
class Examples:
    """Encoded rows in dataset order."""

    token_ids: tuple[tuple[int, ...], ...]
    label_ids: tuple[int, ...]
    """The model's id of each row's label, `NO_LABEL` where the data has none."""
    input_names: tuple[str, ...]
    """What the model's forward takes, in order: `input_ids`, `attention_mask` and, for BERT, `token_type_ids`."""
    pad_id: int
    max_length: int
    """Tokens."""
    truncated: int
    """Rows that were cut at `max_length`."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def labelled(self) -> bool:
        return NO_LABEL not in self.label_ids


@dataclass(frozen=True)
class Batch:
    """`inputs` maps the model's input names to int64 [B, S], in the forward's order; `labels` is int64 [B]."""

    inputs: Mapping[str, Tensor]
    labels: Tensor
    rows: tuple[int, ...]


def encode(texts: LabelledTexts, tokenizer: Any, *, config: Any, max_length: int) -> Examples:
    """Encode every text, cut at `max_length` tokens or at the model's own limit where that is lower.

    `config` is the transformers config: label names become ids by its `label2id`, never by position.
    """
    if not len(texts):
        raise InvalidDataset("the dataset has no rows: at least one is needed")
    if len(tokenizer) > config.vocab_size:
        raise InvalidModel(f"the tokenizer has {len(tokenizer)} tokens, the model's vocabulary {config.vocab_size}")
    limit = min(max_length, config.max_position_embeddings)
    token_ids = tokenizer(list(texts.texts), truncation=False, verbose=False)["input_ids"]
    long = [row for row, ids in enumerate(token_ids) if len(ids) > limit]
    for row in long:
        token_ids[row] = tokenizer(texts.texts[row], truncation=True, max_length=limit)["input_ids"]
    return Examples(
        token_ids=tuple(map(tuple, token_ids)),
        label_ids=_label_ids(texts, config.label2id),
        input_names=tuple(name for name in INPUT_ORDER if name in tokenizer.model_input_names),
        pad_id=int(tokenizer.pad_token_id or 0),
        max_length=limit,
        truncated=len(long),
    )


def collate(examples: Examples, rows: Sequence[int], *, device: str = "cpu") -> Batch:
    """The batch of `rows`, padded on the right to the longest of them."""
    lengths = [len(examples.token_ids[row]) for row in rows]
    input_ids = torch.full((len(rows), max(lengths)), examples.pad_id, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    for position, row in enumerate(rows):
        input_ids[position, : lengths[position]] = torch.tensor(examples.token_ids[row], dtype=torch.int64)
        attention_mask[position, : lengths[position]] = 1
    tensors = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "token_type_ids": torch.zeros_like(input_ids),
    }
    labels = torch.tensor([examples.label_ids[row] for row in rows], dtype=torch.int64)
    inputs = {name: tensors[name].to(device) for name in examples.input_names}
    return Batch(inputs=inputs, labels=labels.to(device), rows=tuple(rows))


def shuffled_batches(examples: Examples, *, batch_size: int, seed: int) -> Iterator[tuple[int, ...]]:
    """Rows of batch 0, 1, 2, ... without end; batch k depends on the lengths, `batch_size` and `seed` alone.

    Every epoch holds each row once, in batches of rows of about equal length, the last one smaller.
    """
    for epoch in count():
        yield from _epoch(examples, batch_size, random.Random(f"{seed}/{epoch}"))


def ordered_batches(examples: Examples, *, batch_size: int) -> Iterator[tuple[int, ...]]:
    """Every row once, shortest first: for measuring, where order does not matter."""
    order = sorted(range(len(examples)), key=lambda row: (len(examples.token_ids[row]), row))
    for start in range(0, len(order), batch_size):
        yield tuple(order[start : start + batch_size])


def spread(examples: Examples, *, limit: int) -> Examples:
    """At most `limit` rows, evenly spaced over the dataset, in its order."""
    if len(examples) <= limit:
        return examples
    rows = [row * len(examples) // limit for row in range(limit)]
    return replace(
        examples,
        token_ids=tuple(examples.token_ids[row] for row in rows),
        label_ids=tuple(examples.label_ids[row] for row in rows),
    )


def _epoch(examples: Examples, batch_size: int, generator: random.Random) -> list[tuple[int, ...]]:
    order = generator.sample(range(len(examples)), len(examples))
    window = batch_size * WINDOW_BATCHES
    batches = []
    for start in range(0, len(order), window):
        part = sorted(order[start : start + window], key=lambda row: len(examples.token_ids[row]))
        batches += [tuple(part[i : i + batch_size]) for i in range(0, len(part), batch_size)]
    generator.shuffle(batches)
    return batches


def _label_ids(texts: LabelledTexts, label2id: Mapping[str, int]) -> tuple[int, ...]:
    if not texts.labels:
        return (NO_LABEL,) * len(texts)
    unknown = next((label for label in texts.labels if label not in label2id), None)
    if unknown is not None:
        raise InvalidDataset(f"label {unknown!r} is unknown to the model, which knows {', '.join(map(str, label2id))}")
    return tuple(label2id[label] for label in texts.labels)
