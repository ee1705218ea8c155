"""What to measure: the task, the columns of its dataset, the shapes of the latency runs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from modelpress.documents import Document, parse_yaml, read_value
from modelpress.errors import InvalidRequest
from modelpress.recipes import Recipe

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


class LanguageEvaluation(Document):
    """How a language model's candidate is judged. A row of the dataset (JSON lines) is one of three:

    {"text": ...}                                   for perplexity and token KL
    {"prompt": ..., "choices": [...], "answer": 0}  a question; `answer` counts the choices from 0
    {"prompt": ...}                                 to be continued greedily, side by side in the report

    A choice is scored as the text prompt + choice, joined as they stand: write the space between them.

    The texts' tokens, one text after the other, are cut into windows. A window predicts the tokens that no window
    before it saw, but its own first one never: nothing precedes it. `-` read only, `x` read and predicted, for 16
    tokens in windows of 8, with a stride of 4 (every token but the first of all is predicted, exactly once):

        -xxxxxxx
            ----xxxx
                ----xxxx

    and with a stride of 8 (every token but each window's first):

        -xxxxxxx
                -xxxxxxx
    """

    task: Literal["text-generation"] = "text-generation"
    text_column: str = Field(default="text", min_length=1, max_length=255)
    prompt_column: str = Field(default="prompt", min_length=1, max_length=255)
    choices_column: str = Field(default="choices", min_length=1, max_length=255)
    answer_column: str = Field(default="answer", min_length=1, max_length=255)
    window: int = Field(default=512, ge=8, le=8192)
    """Tokens that the model sees at once."""
    stride: int | None = Field(default=None, ge=1, le=8192)
    """Tokens from one window's start to the next one's; None: `window`, so that none is read twice."""
    batch_size: int = Field(default=4, ge=1, le=1024)
    """Windows, or choices, of one forward pass; figures do not depend on it."""
    generations: int = Field(default=4, ge=0, le=64)
    """Prompts that are continued. Without prompts in the dataset: the first 32 tokens of its first texts."""
    max_new_tokens: int = Field(default=32, ge=1, le=1024)
    confidence: float = Field(default=0.95, gt=0.5, lt=1)

    @model_validator(mode="after")
    def _is_possible(self) -> LanguageEvaluation:
        columns = (self.text_column, self.prompt_column, self.choices_column, self.answer_column)
        if len(set(columns)) != len(columns):
            raise ValueError(f"{', '.join(columns)}: the four columns need different names")
        if self.stride is not None and self.stride > self.window:
            raise ValueError(
                f"stride {self.stride} is more than window {self.window}: tokens between would be left out"
            )
        return self

    @property
    def step(self) -> int:
        """The stride, also where it is left to its default."""
        return self.stride or self.window


AnyEvaluation = Evaluation | LanguageEvaluation


def read_evaluation(text: str) -> AnyEvaluation:
    """Parse an evaluation; its `task` says which kind it is. A fault is one InvalidRequest."""
    value = parse_yaml(text, InvalidRequest)
    is_language = isinstance(value, dict) and value.get("task") == LanguageEvaluation.model_fields["task"].default
    if is_language:
        return read_value(LanguageEvaluation, value, InvalidRequest)
    return read_value(Evaluation, value, InvalidRequest)


def default_evaluation(recipe: Recipe) -> AnyEvaluation:
    """What an empty evaluation means: the task that the recipe's stages are for."""
    return LanguageEvaluation() if recipe.quantize_weights else Evaluation()
