"""The policy: gates with bounds, written as YAML, that a candidate must pass to be approved.

    gates:
      accuracy_drop: {max: 0.01, confidence: 0.95}
      flips: {max_share: 0.03}
      kl_mean: {max: 0.05}
      size: {max_ratio: 0.30}
      speed: {min_ratio: 3.0, batch_size: 1, sequence_length: 64}
      parity: {max_logit_difference: 0.001}

For language models, which have no `speed` gate, also:

    gates:
      perplexity: {max_ratio: 1.1}
      top1_agreement: {min_share: 0.8}

For recipes that merge, also of a policy of their own:

    gates:
      merge_difference: {max: 0.005}
      merge_logits: {max: 0.02}
      merge_change: {max: 0.5}

A gate that is left out is not applied; the report says so. Shares and ratios are fractions, not percent.
"""

from __future__ import annotations

import hashlib
from typing import Any

from pydantic import Field, model_validator

from modelpress.canonical import canonical_json
from modelpress.documents import Document, read_document
from modelpress.errors import InvalidPolicy


class AccuracyDrop(Document):
    """Baseline accuracy minus candidate accuracy, paired over the same examples or questions; fraction in [0, 1].

    Passes when the interval's upper end is at most `max`, fails when its lower end is above, and is
    inconclusive between.
    """

    max: float = Field(ge=0, le=1)
    confidence: float = Field(default=0.95, gt=0.5, lt=1)


class Flips(Document):
    """Share of examples whose predicted label differs between baseline and candidate; judged on its interval.

    Of a language model an example is a token and its label the most likely next one; tokens of one window are not
    independent of each other, and the interval allows for that.
    """

    max_share: float = Field(ge=0, le=1)
    confidence: float = Field(default=0.95, gt=0.5, lt=1)


class KlMean(Document):
    """Mean KL divergence from the baseline's to the candidate's label distribution, in nats."""

    max: float = Field(ge=0)


class KlP99(Document):
    """99th percentile of the same divergence, in nats."""

    max: float = Field(ge=0)


class Size(Document):
    """Bytes of the candidate's model files over those of the baseline's, in the format that it is measured in."""

    max_ratio: float = Field(gt=0)


class Speed(Document):
    """Median of baseline latency / candidate latency, paired in one run, at one named shape.

    Judged on the median's 95 % order-statistic interval: passes when its lower end is at least `min_ratio`, fails when
    its upper end is below, and is inconclusive between.
    """

    min_ratio: float = Field(gt=0)
    batch_size: int = Field(default=1, ge=1, le=1024)
    sequence_length: int = Field(default=64, ge=1, le=8192)
    """Tokens."""


class Parity(Document):
    """Largest absolute logit difference between the compressed model in torch and its export in the runtime."""

    max_logit_difference: float = Field(ge=0)


class Perplexity(Document):
    """Candidate perplexity over baseline perplexity on the same tokens; judged on its interval, paired over windows."""

    max_ratio: float = Field(gt=0)
    confidence: float = Field(default=0.95, gt=0.5, lt=1)


class Top1Agreement(Document):
    """Share of tokens where both models find the same next token most likely; judged on its interval."""

    min_share: float = Field(ge=0, le=1)
    confidence: float = Field(default=0.95, gt=0.5, lt=1)


class MergeDifference(Document):
    """Largest relative difference of a merged layer's outputs, as stored, from base plus adapters run by PEFT.

    One rounding of the weights leaves about 0.002 in bfloat16 and 0.0002 in float16, at most 0.004 and 0.0005 of each
    weight; in float32 only the order of the additions is left, less than 0.000001.
    """

    max: float = Field(ge=0)


class MergeLogits(Document):
    """Largest absolute logit difference between the two, over the largest absolute logit."""

    max: float = Field(ge=0)


class MergeChange(Document):
    """Largest change of a tensor by the merge: Frobenius norm of the change over that of the weight."""

    max: float = Field(ge=0)


class Gates(Document):
    accuracy_drop: AccuracyDrop | None = None
    flips: Flips | None = None
    kl_mean: KlMean | None = None
    kl_p99: KlP99 | None = None
    size: Size | None = None
    speed: Speed | None = None
    parity: Parity | None = None
    perplexity: Perplexity | None = None
    top1_agreement: Top1Agreement | None = None
    merge_difference: MergeDifference | None = None
    merge_logits: MergeLogits | None = None
    merge_change: MergeChange | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_empty_gates(cls, value: Any) -> Any:
        empty = next((name for name in value if value[name] is None), None) if isinstance(value, dict) else None
        if empty is not None:
            raise ValueError(f"gate {str(empty)[:80]!r} has no bound: give one, or leave the gate out")
        return value

    @model_validator(mode="after")
    def _has_a_gate(self) -> Gates:
        if all(getattr(self, name) is None for name in type(self).model_fields):
            raise ValueError(f"at least one gate is needed; known gates: {', '.join(type(self).model_fields)}")
        return self


class Policy(Document):
    gates: Gates

    def canonical(self) -> bytes:
        return canonical_json(self.model_dump(mode="json"))

    @property
    def digest(self) -> str:
        return "sha256:" + hashlib.sha256(self.canonical()).hexdigest()


def read_policy(text: str) -> Policy:
    """Parse a policy; a fault is one InvalidPolicy naming the field and what is allowed."""
    return read_document(Policy, text, InvalidPolicy)
