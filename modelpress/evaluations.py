"""What to measure: the task, the columns of its dataset, the shapes of the latency runs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from modelpress.documents import Document, read_document
from modelpress.errors import InvalidRequest

Shape = Annotated[int, Field(strict=True, ge=1, le=8192)]


class Latency(Document):
    """Batch sizes x sequence lengths, each timed `repeats` times after `warmup` runs, the two models in turn."""

    batch_sizes: tuple[Shape, ...] = Field(default=(1, 8), min_length=1, max_length=8)
    sequence_lengths: tuple[Shape, ...] = Field(default=(16, 64), min_length=1, max_length=8)
    """Tokens."""
    warmup: int = Field(default=5, ge=0, le=1000)
    repeats: int = Field(default=40, ge=3, le=10_000)
    threads: int = Field(default=1, ge=1, le=256)

    @field_validator("batch_sizes", "sequence_lengths")
    @classmethod
    def _shapes_each_once(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(sizes)) != len(sizes):
            raise ValueError(f"{', '.join(map(str, sizes))} holds a size twice: each is measured once")
        return sizes


class Evaluation(Document):
    """How the candidate is judged. The dataset is the request's evaluation dataset (JSON lines)."""

    task: Literal["text-classification"] = "text-classification"
    text_column: str = Field(default="text", min_length=1, max_length=255)
    label_column: str = Field(default="label", min_length=1, max_length=255)
    """Holds label names of the model's `id2label`, or integer ids when `label_names` maps them to names."""
    label_names: tuple[str, ...] = ()
    """Name of integer label 0, 1, ... of the dataset. Empty: the column holds names."""
    max_length: int = Field(default=128, ge=2, le=8192)
    """Tokens; longer texts are cut, and counted in the report."""
    batch_size: int = Field(default=32, ge=1, le=1024)
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    latency: Latency = Latency()

    @model_validator(mode="after")
    def _columns_differ(self) -> Evaluation:
        if self.text_column == self.label_column:
            raise ValueError(f"text_column and label_column are both {self.text_column[:80]!r}: they are two columns")
        return self


def read_evaluation(text: str) -> Evaluation:
    return read_document(Evaluation, text, InvalidRequest)
