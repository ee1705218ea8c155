"""What is measured of a language model, as types: the part of the report beside those of merges and classifiers."""

from __future__ import annotations

from modelpress.documents import Document
from modelpress.metrics import Footprint, Metric, PairedCounts, ParityReport


class TokenWindow(Document):
    """One window of the evaluation texts: sums over the tokens that it predicts. What the intervals come from."""

    tokens: int
    baseline_nats: float
    """Sum of -log p(token) of the baseline."""
    candidate_nats: float
    kl_nats: float
    """Sum of KL(baseline || candidate) over the whole vocabulary."""
    agreements: int
    """Positions where both models have the same most likely token."""


class ChoiceReport(Document):
    """Questions with given answers: the answer of the highest log-likelihood per token is the model's."""

    baseline_accuracy: Metric
    candidate_accuracy: Metric
    paired: PairedCounts
    accuracy_drop: Metric
    """Paired difference, baseline minus candidate."""


class Generation(Document):
    """Greedy continuations of one prompt. `index` is the row of the dataset that it comes from, from 0."""

    index: int
    prompt: str
    baseline: str
    candidate: str
    equal_tokens: int
    """Tokens up to the first difference."""
    tokens: int
    """Tokens of the longer continuation."""


class LanguageReport(Document):
    """Baseline and candidate as stored, in their runtimes, on the same tokens."""

    dataset: str
    """Digest of the dataset."""
    baseline_runtime: str
    """e.g. `transformers 5.24.0 cpu float32`."""
    candidate_runtime: str
    window: int
    """Tokens of one window."""
    stride: int
    """Tokens from one window's start to the next one's."""
    baseline_perplexity: Metric
    candidate_perplexity: Metric
    perplexity_ratio: Metric
    """Candidate over baseline; its interval is paired over the windows."""
    token_kl: Metric
    """Mean KL(baseline || candidate) per token, in nats."""
    top1_agreement: Metric
    windows: tuple[TokenWindow, ...]
    choices: ChoiceReport | None = None
    """None where the dataset has no questions."""
    generations: tuple[Generation, ...] = ()
    footprint: Footprint
    parity: ParityReport | None = None
    """The compressed model in torch against its ONNX export; None for other formats."""
    measured_by: str = ""
    """The conversion that measured it."""
    warnings: tuple[str, ...] = ()
