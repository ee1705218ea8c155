"""Texts to padded batches of token ids, by the tokenizer of the model's own folder.

Shapes: N rows of a batch, T tokens of its longest row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

from evaluators.runtimes import Feeds
from modelpress.errors import InvalidDataset, InvalidModel, InvalidRequest

CHUNK_TEXTS = 1024
VOCABULARY_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)


@dataclass(frozen=True)
class EncodedTexts:
    """Token ids and segment ids of every row, cut at the maximum length; `truncated` rows were longer."""

    input_ids: tuple[list[int], ...]
    token_type_ids: tuple[list[int], ...]
    pad_id: int
    """0 where the tokenizer names none."""
    truncated: int


def load_tokenizer(model: Path) -> Any:
    """The tokenizer of a model folder; no code from the folder is run.

    Raises InvalidModel where the folder holds no vocabulary: transformers would go on with an empty one, in which
    every word is unknown.
    """
    if not any((model / name).is_file() for name in VOCABULARY_FILES):
        raise InvalidModel("the model has no tokenizer: put its tokenizer.json beside config.json")
    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InvalidModel("the model's tokenizer cannot be loaded: save it again with `save_pretrained`") from error


def check_max_length(max_length: int, *, config: Mapping[str, Any], tokenizer: Any) -> None:
    """Raise InvalidRequest where texts would be cut later than the model can take them."""
    limits = [limit for limit in (config.get("max_position_embeddings"), tokenizer.model_max_length) if limit]
    longest = min(limits, default=max_length)
    if max_length > longest:
        raise InvalidRequest(
            f"max_length is {max_length}, but the model takes at most {longest} tokens: set it to {longest} or less",
            field="evaluation.max_length",
        )


def check_ids(encoded: EncodedTexts, *, vocabulary: int | None) -> None:
    """Raise InvalidModel where the tokenizer gives an id that the model's table of `vocabulary` rows does not have."""
    largest = max(encoded.pad_id, *map(max, encoded.input_ids))
    if vocabulary is not None and largest >= vocabulary:
        raise InvalidModel(
            f"the tokenizer gives token id {largest}, and the model's vocabulary has {vocabulary}: use the model's own "
            "tokenizer, without added tokens",
            reason="BAD_TOKENIZER",
        )


def encode(texts: Sequence[str], *, tokenizer: Any, max_length: int) -> EncodedTexts:
    """Tokenize with special tokens; texts over `max_length` tokens are cut as the tokenizer cuts, and counted."""
    ids: list[list[int]] = []
    types: list[list[int]] = []
    truncated = 0
    for start in range(0, len(texts), CHUNK_TEXTS):
        chunk = list(texts[start : start + CHUNK_TEXTS])
        whole = tokenizer(chunk, return_token_type_ids=True, verbose=False)
        over = [i for i, row in enumerate(whole["input_ids"]) if len(row) > max_length]
        for i in over:
            cut = tokenizer(chunk[i], return_token_type_ids=True, truncation=True, max_length=max_length)
            whole["input_ids"][i], whole["token_type_ids"][i] = cut["input_ids"], cut["token_type_ids"]
        truncated += len(over)
        ids += whole["input_ids"]
        types += whole["token_type_ids"]
    empty = next((i for i, row in enumerate(ids) if not row), None)
    if empty is not None:
        raise InvalidDataset(f"row {empty} (from 0) of the dataset gives no token: leave empty texts out")
    return EncodedTexts(tuple(ids), tuple(types), tokenizer.pad_token_id or 0, truncated)


def padded_batches(encoded: EncodedTexts, *, batch_size: int) -> Iterator[tuple[NDArray[np.int64], Feeds]]:
    """Row numbers and feeds of each batch, shortest rows first so that little is padded; every row once."""
    lengths = [len(row) for row in encoded.input_ids]
    order = np.argsort(lengths, kind="stable")
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        yield rows, _pad(encoded, rows)


def _pad(encoded: EncodedTexts, rows: NDArray[np.int64]) -> Feeds:
    """Feeds [N, T], padded on the right; padding has mask 0, so that which token it is changes nothing."""
    lengths = [len(encoded.input_ids[i]) for i in rows]
    shape = (len(rows), max(lengths))
    ids_NT = np.full(shape, encoded.pad_id, dtype=np.int64)
    types_NT, mask_NT = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    for n, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        ids_NT[n, :length] = encoded.input_ids[row]
        types_NT[n, :length] = encoded.token_type_ids[row]
        mask_NT[n, :length] = 1
    return {"input_ids": ids_NT, "attention_mask": mask_NT, "token_type_ids": types_NT}
