"""What a stage that does not train looks at: rows to probe with, and quality before and after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressors.batches import INPUT_ORDER, NO_LABEL, Batch, Examples, collate, spread
from compressors.distillation import held_out_figures, model_forward, predict
from compressors.folders import load_tokenizer
from compressors.stages import Job
from compressors.training import encode_data

PROBE_ROWS = 32
PROBE_TOKENS = 16
MAX_LENGTH = 128
"""Tokens of a text that is only measured on: these stages have no length of their own in the recipe."""


@dataclass(frozen=True)
class Rows:
    """`probe` is always there; training and held-out rows where the job has data."""

    probe: Examples
    train: Examples | None = None
    held_out: Examples | None = None
    provenance: str = "random token ids from the seed"

    def probe_batch(self, device: str) -> Batch:
        return collate(self.probe, range(len(self.probe)), device=device)


def read_rows(job: Job, config: Any) -> Rows:
    """The job's data, encoded; without data, the probe is made of random tokens."""
    if job.data is None:
        return Rows(probe=random_examples(config, seed=job.seed))
    train, held_out = encode_data(job.data, load_tokenizer(job.model), config=config, max_length=MAX_LENGTH)
    probe = spread(train, limit=PROBE_ROWS)
    return Rows(probe=probe, train=train, held_out=held_out, provenance="training texts")


def random_examples(config: Any, *, seed: int) -> Examples:
    """Seeded rows of random tokens, of every length from 1 up."""
    generator = torch.Generator().manual_seed(seed)
    longest = min(PROBE_TOKENS, config.max_position_embeddings)
    ids = torch.randint(0, config.vocab_size, (PROBE_ROWS, longest), generator=generator).tolist()
    rows = tuple(tuple(row[: 1 + index % longest]) for index, row in enumerate(ids))
    return Examples(
        token_ids=rows,
        label_ids=(NO_LABEL,) * len(rows),
        input_names=INPUT_ORDER,
        pad_id=config.pad_token_id or 0,
        max_length=longest,
        truncated=0,
    )


def reference_logits(model: Any, rows: Rows, *, device: str) -> Tensor | None:
    """The model's held-out logits, [N, C]; None without held-out rows."""
    return None if rows.held_out is None else predict(model_forward(model), rows.held_out, device=device)


def quality(model: Any, rows: Rows, *, reference: Tensor | None, device: str) -> dict[str, float]:
    """Held-out figures against `reference`; empty without held-out rows."""
    if rows.held_out is None or reference is None:
        return {}
    return held_out_figures(reference, predict(model_forward(model), rows.held_out, device=device), rows.held_out)


@torch.inference_mode()
def probe_logits(model: Any, rows: Rows, *, device: str) -> Tensor:
    """Logits of the probe, [P, C], on the CPU."""
    logits: Tensor = model(**rows.probe_batch(device).inputs).logits
    return logits.float().cpu()


def largest_difference(left: Tensor, right: Tensor) -> float:
    """max |left - right|; NaN where either holds one."""
    return float((left - right).abs().max())
