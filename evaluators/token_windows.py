"""A dataset's tokens as one sequence, cut into windows.

The tokens are those of the texts, one text after the other, each tokenized by itself with the special tokens that the
tokenizer adds by default: they are tokens like any other. Shapes: B windows, T tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modelpress.errors import InvalidDataset, InvalidModel, InvalidRequest

CHUNK_TEXTS = 1024


@dataclass(frozen=True)
class Window:
    """The model sees tokens [start, stop) of the sequence; those of [first, stop) are predicted, start < first."""

    start: int
    stop: int
    first: int

    @property
    def predicted(self) -> int:
        return self.stop - self.first


def cut_windows(tokens: int, *, window: int, stride: int) -> tuple[Window, ...]:
    """Windows of `window` tokens, one every `stride` (at most `window`), up to the last token; the last may be shorter.

    A window predicts the tokens that no window before it saw, save its own first one, which nothing precedes. So no
    token is predicted twice; with stride < window every token but the very first is predicted, with stride = window
    every token but each window's first. A window that would predict nothing is left out.
    """
    windows = []
    start = seen = 0
    while seen < tokens:
        stop = min(start + window, tokens)
        first = max(seen, start + 1)
        if first < stop:
            windows.append(Window(start, stop, first))
        start, seen = start + stride, stop
    return tuple(windows)


def text_tokens(texts: Sequence[str], tokenizer: Any) -> list[int]:
    """The ids of all texts, in their order. InvalidDataset for fewer than two: nothing could be predicted."""
    ids: list[int] = []
    for start in range(0, len(texts), CHUNK_TEXTS):
        for row in tokenizer(list(texts[start : start + CHUNK_TEXTS]), verbose=False)["input_ids"]:
            ids += row
    if len(ids) < 2:
        raise InvalidDataset(f"the dataset's texts give {len(ids)} tokens: at least 2 are needed, and thousands help")
    return ids


def padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, T], padded on the right with id 0 and mask 0, so that which token it is changes nothing."""
    longest = max(map(len, rows))
    ids_BT = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    mask_BT = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return ids_BT, mask_BT


def batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """`size` items at a time, in their order; the last batch may be smaller."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def common_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with in common."""
    pairs = zip(one, other, strict=False)
    return next((count for count, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def check_window(window: int, config: Mapping[str, Any]) -> None:
    """InvalidRequest where the window is longer than the model was made for."""
    longest = config.get("max_position_embeddings")
    if isinstance(longest, int) and window > longest:
        raise InvalidRequest(
            f"window is {window}, but the model takes at most {longest} tokens: set it to {longest} or less",
            field="evaluation.window",
        )


def check_vocabulary(ids: Iterable[int], config: Mapping[str, Any]) -> None:
    """InvalidModel where the tokenizer gives an id that the model has no embedding for."""
    largest, vocabulary = max(ids), config.get("vocab_size")
    if isinstance(vocabulary, int) and largest >= vocabulary:
        raise InvalidModel(
            f"the tokenizer gives token id {largest}, and the model's vocabulary has {vocabulary}: use the model's own "
            "tokenizer, without added tokens",
            reason="BAD_TOKENIZER",
        )
