"""Seeded inputs that cost nothing to compute, so that a benchmark of the service measures the service.

write_model(folder)                 a BERT classifier of 2 labels with its tokenizer; `vocabulary` rows set its size
write_dataset(folder)               labelled texts as JSON lines
stamp(file, number)                 other bytes, still a sound model: what is held already would not be sent again
"""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast
from transformers.utils.logging import disable_progress_bar

LABELS = ("calm", "loud")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = {"calm": ("quiet", "soft", "slow", "still"), "loud": ("bang", "crash", "shout", "roar")}
VOCABULARY = (*SPECIAL, *WORDS["calm"], *WORDS["loud"])
HIDDEN = 64
WEIGHTS = "model.safetensors"
"""File of a model folder that holds all but a few kilobytes of it."""


def write_model(folder: Path, *, vocabulary: int = len(VOCABULARY)) -> Path:
    """Every file that a model needs. The embedding table has `vocabulary` rows of 256 bytes."""
    disable_progress_bar()
    folder.mkdir(parents=True)
    words = folder / "vocab.txt"
    words.write_text("".join(f"{word}\n" for word in VOCABULARY))
    BertTokenizerFast(vocab_file=str(words), model_max_length=64).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=2 * HIDDEN,
        max_position_embeddings=64,
        id2label=dict(enumerate(LABELS)),
        label2id={label: index for index, label in enumerate(LABELS)},
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def write_dataset(folder: Path, *, rows: int = 64) -> Path:
    folder.mkdir(parents=True)
    chance = random.Random(0)
    lines = []
    for row in range(rows):
        label = LABELS[row % len(LABELS)]
        lines.append(json.dumps({"text": " ".join(chance.choices(WORDS[label], k=6)), "label": label}))
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def stamp(file: Path, number: int) -> None:
    """Overwrite the last float of the weights with `number`."""
    with file.open("r+b") as weights:
        weights.seek(-4, 2)
        weights.write(struct.pack("<f", number))
