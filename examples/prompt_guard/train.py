"""Train the LoRA adapter that detects prompt injection: about ten minutes on one CPU thread.

The adapter in this folder was made by this script; running it again writes the same kind of adapter
(the bytes depend on the CPU).

    python examples/prompt_guard/train.py build/prompt_guard examples/prompt_guard/adapter
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import torch
from assets import LABELS, MAX_LENGTH
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification, AutoTokenizer

SEED = 0
RANK = 16
BATCH_SIZE = 32
EPOCHS = 3
LEARNING_RATE = 1e-3
WARMUP_STEPS = 60


def read_split(file: Path) -> tuple[list[str], list[int]]:
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [row["text"] for row in rows], [LABELS.index(row["label"]) for row in rows]


def batches(lengths: list[int], rng: random.Random) -> list[list[int]]:
    """Shuffle in windows sorted by length, so that a batch carries little padding."""
    order = rng.sample(range(len(lengths)), len(lengths))
    window = BATCH_SIZE * 20
    chunks = []
    for start in range(0, len(order), window):
        part = sorted(order[start : start + window], key=lambda index: lengths[index])
        chunks += [part[i : i + BATCH_SIZE] for i in range(0, len(part), BATCH_SIZE)]
    rng.shuffle(chunks)
    return chunks


@torch.inference_mode()
def accuracy(model: torch.nn.Module, tokenizer, texts: list[str], labels: list[int]) -> float:
    model.eval()
    right = 0
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    for start in range(0, len(order), 64):
        part = order[start : start + 64]
        chosen = [texts[i] for i in part]
        inputs = tokenizer(chosen, truncation=True, max_length=MAX_LENGTH, padding=True, return_tensors="pt")
        predicted = model(**inputs).logits.argmax(-1).tolist()
        right += sum(p == labels[i] for p, i in zip(predicted, part, strict=True))
    return right / len(texts)


def train(data: Path, output: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(data / "baseline")
    base = AutoModelForSequenceClassification.from_pretrained(data / "baseline")
    targets = {"target_modules": ["query", "value"], "modules_to_save": ["classifier"]}
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, task_type="SEQ_CLS", **targets)
    model = get_peft_model(base, config)
    texts, labels = read_split(data / "train/train.jsonl")
    encoded = tokenizer(texts, truncation=True, max_length=MAX_LENGTH)["input_ids"]
    lengths = [len(ids) for ids in encoded]
    rng = random.Random(SEED)
    schedule = [batch for _ in range(EPOCHS) for batch in batches(lengths, rng)]
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.01)
    decay = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP_STEPS, (len(schedule) - step) / (len(schedule) - WARMUP_STEPS))
    )
    model.train()
    start = time.monotonic()
    for step, batch in enumerate(schedule):
        inputs = tokenizer.pad({"input_ids": [encoded[i] for i in batch]}, return_tensors="pt")
        loss = cross_entropy(model(**inputs).logits, torch.tensor([labels[i] for i in batch]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        decay.step()
        if step % 50 == 0:
            print(f"step {step}/{len(schedule)} loss {loss.item():.4f} {time.monotonic() - start:.0f} s", flush=True)
    for split in ("validation", "test"):
        print(split, f"accuracy {accuracy(model, tokenizer, *read_split(data / split / f'{split}.jsonl')):.4f}")
    model.save_pretrained(output)


if __name__ == "__main__":
    train(Path(sys.argv[1]), Path(sys.argv[2]))
