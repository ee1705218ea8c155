"""What to measure: the task, the columns of its dataset, the shapes of the latency runs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from modelpress.documents import Document, read_document
from modelpress.errors import InvalidRequest

Shape = Annotated[int, Field(ge=1, le=8192)]


class Latency(Document):
    """Batch sizes x sequence lengths, each timed `repeats` times after `warmup` runs, baseline and candidate in turn."""

    batch_sizes: tuple[Shape, ...] = Field(default=(1, 8), min_length=1, max_length=8)
    sequence_lengths: tuple[Shape, ...] = Field(default=(16, 64), min_length=1, max_length=8)
    """Tokens."""
    warmup: int = Field(default=5, ge=0, le=1000)
    repeats: int = Field(default=40, ge=3, le=10_000)
    threads: int = Field(default=1, ge=1, le=256)


class Evaluation(Document):
    """How the candidate is judged. The dataset is the request's evaluation dataset (JSON lines)."""

    task: Literal["text-classification"] = "text-classification"
    text_column: str = "text"
    label_column: str = "label"
    """Holds label names of the model's `id2label`, or integer ids when `label_names` maps them to names."""
    label_names: tuple[str, ...] = ()
    """Name of integer label 0, 1, ... of the dataset. Empty: the column holds names."""
    max_length: int = Field(default=128, ge=2, le=8192)
    """Tokens; longer texts are cut, and counted in the report."""
    batch_size: int = Field(default=32, ge=1, le=1024)
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    latency: Latency = Latency()


def read_evaluation(text: str) -> Evaluation:
    return read_document(Evaluation, text, InvalidRequest)
