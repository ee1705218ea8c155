"""Calibration windows: the tokens of the training texts, one text after the other, cut into windows of one length.

Shapes: N windows, T tokens of a window.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressors.folders import load_tokenizer
from compressors.stages import Calibration
from modelpress.datasets import dataset_rows, text_of
from modelpress.errors import InvalidDataset, InvalidModel
from modelpress.quantization_recipes import QuantizeWeights

TEXTS_AT_ONCE = 64


@dataclass(frozen=True, eq=False)
class CalibrationWindows:
    """`available` counts the windows of the whole dataset: where they are more, those in `ids_NT` were drawn."""

    ids_NT: Tensor
    """int64."""
    available: int
    dataset: str
    """Its digest."""
    warnings: tuple[str, ...]

    @property
    def facts(self) -> dict[str, Any]:
        """For the stage's record."""
        windows, tokens = self.ids_NT.shape
        return {
            "dataset": self.dataset,
            "windows": windows,
            "windows_available": self.available,
            "sequence_length": tokens,
            "tokens": windows * tokens,
        }


def read_windows(calibration: Calibration, arguments: QuantizeWeights, *, seed: int) -> CalibrationWindows:
    """Tokenize the dataset, text by text, and keep `calibration_samples` of its windows: all, or a seeded choice.

    Each text is tokenized as the tokenizer does by itself, its special tokens included; the rest that fills no window
    is left out. InvalidDataset where the texts do not fill one window.
    """
    rows = dataset_rows(calibration.dataset)
    texts = (text_of(row, calibration.text_column, where) for where, row in rows)
    tokens = _tokens(load_tokenizer(calibration.tokenizer), texts)
    chosen, available = choose(_windows(tokens, arguments.sequence_length), arguments.calibration_samples, seed=seed)
    if not chosen:
        raise InvalidDataset(
            f"the calibration texts do not fill one window of {arguments.sequence_length} tokens: add training texts, "
            "or lower sequence_length",
            field="sequence_length",
        )
    warnings = _too_few(len(chosen), arguments)
    return CalibrationWindows(torch.tensor(chosen), available, calibration.digest, warnings)


def check_vocabulary(ids_NT: Tensor, vocabulary: int) -> None:
    """InvalidModel where the tokenizer knows a token that the model has no embedding of."""
    if (highest := int(ids_NT.max())) >= vocabulary:
        raise InvalidModel(
            f"the tokenizer gives token {highest}, and the model's embeddings have {vocabulary} rows: the tokenizer is "
            "another model's",
            field="tokenizer.json",
        )


def choose(windows: Iterable[list[int]], count: int, *, seed: int) -> tuple[list[list[int]], int]:
    """`count` of the windows in their order, each choice equally likely, and how many there were.

    One pass, `count` windows in memory: algorithm R (Vitter 1985, "Random sampling with a reservoir").
    """
    generator = random.Random(seed)
    kept: list[tuple[int, list[int]]] = []
    seen = 0
    for seen, window in enumerate(windows, 1):
        if len(kept) < count:
            kept.append((seen, window))
        elif (place := generator.randrange(seen)) < count:
            kept[place] = (seen, window)
    return [window for _, window in sorted(kept)], seen


def _tokens(tokenizer: Any, texts: Iterator[str]) -> Iterator[int]:
    for some in _chunks(texts, TEXTS_AT_ONCE):
        for ids in tokenizer(some, return_attention_mask=False, verbose=False)["input_ids"]:
            yield from ids


def _windows(tokens: Iterator[int], length: int) -> Iterator[list[int]]:
    """Full windows only."""
    return (window for window in _chunks(tokens, length) if len(window) == length)


def _chunks(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    chunk: list[Any] = []
    for item in items:
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _too_few(windows: int, arguments: QuantizeWeights) -> tuple[str, ...]:
    if windows >= arguments.calibration_samples:
        return ()
    length = arguments.sequence_length
    return (
        f"the calibration texts fill {windows} windows of {length} tokens, {windows * length} tokens in all, where "
        f"calibration_samples asks for {arguments.calibration_samples}: with more training texts the codes fit better",
    )
