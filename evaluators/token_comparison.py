"""Two language models on the same tokens: what each says of every token, and how far their distributions lie apart.

Both are open at once, so that logits are compared while they are in memory and never stored. Shapes: N predicted
tokens, B windows, T tokens of a window, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evaluators.language_models import LanguageModel, open_language_model
from evaluators.runtimes import Resources, read_config
from evaluators.token_figures import TokenFacts, TokenFigures
from evaluators.token_windows import Window, batches, check_vocabulary, check_window, cut_windows, padded, text_tokens
from evaluators.tokenization import load_tokenizer
from modelpress.errors import InvalidModel
from modelpress.evaluations import LanguageEvaluation
from modelpress.language_rows import read_language_rows

CHUNK_TOKENS = 16
"""Positions whose float64 distributions are in memory at once."""

Progress = Callable[[int, int], None]
"""Called with the work done and all there is."""


@dataclass(frozen=True)
class ComparedModels:
    """Two complete model folders; the second one was made from the first, with its tokenizer."""

    baseline: Path
    candidate: Path

    def tokens(self, texts: Sequence[str]) -> list[int]:
        """The texts' ids. InvalidModel where the two tokenizers give others: the figures would not be of one text."""
        ids = text_tokens(texts, load_tokenizer(self.baseline))
        if text_tokens(texts, load_tokenizer(self.candidate)) != ids:
            raise InvalidModel(
                "baseline and candidate split the texts into different tokens: keep the baseline's tokenizer",
                reason="BAD_TOKENIZER",
            )
        return ids


class Compared(NamedTuple):
    """Figures [N] of so many tokens, as TokenFigures has them."""

    baseline_nats: Tensor
    candidate_nats: Tensor
    kl: Tensor
    baseline_top: Tensor
    candidate_top: Tensor


def compare_tokens(
    models: ComparedModels, *, data: Path, evaluation: LanguageEvaluation, resources: Resources, progress: Progress
) -> TokenFigures:
    """Run both models over the dataset's texts, window by window; `progress` counts windows.

    The figures do not depend on `batch_size`, up to float rounding. Raises InvalidDataset for a dataset without text,
    InvalidModel where a model answers with NaN or infinity, or the two have different vocabularies.
    """
    ids = models.tokens([row.text for row in read_language_rows(data, evaluation).texts])
    config = read_config(models.baseline)
    check_window(evaluation.window, config)
    check_vocabulary(ids, config)
    windows = cut_windows(len(ids), window=evaluation.window, stride=evaluation.step)
    pair = tuple(open_language_model(folder, resources) for folder in (models.baseline, models.candidate))
    found: list[Compared] = []
    for batch in batches(windows, evaluation.batch_size):
        found += compare_windows(pair, ids=ids, windows=batch)
        progress(len(found), len(windows))
    tensors = {name: torch.cat([part[at] for part in found]).numpy() for at, name in enumerate(Compared._fields)}
    tops = {*tensors["baseline_top"].tolist(), *tensors["candidate_top"].tolist()}
    facts = TokenFacts(
        baseline_runtime=pair[0].runtime,
        candidate_runtime=pair[1].runtime,
        window=evaluation.window,
        stride=evaluation.step,
        answers=token_texts(tops, load_tokenizer(models.baseline)),
    )
    counts = torch.tensor([window.predicted for window in windows])
    return TokenFigures(**tensors, window_tokens=counts.numpy(), facts=facts)


def compare_windows(pair: Sequence[LanguageModel], *, ids: Sequence[int], windows: Sequence[Window]) -> list[Compared]:
    """The figures of each window, from one forward pass of either model."""
    ids_BT, mask_BT = padded([ids[window.start : window.stop] for window in windows])
    baseline_BTV, candidate_BTV = (model.logits(ids_BT, mask_BT) for model in pair)
    if baseline_BTV.shape[-1] != candidate_BTV.shape[-1]:
        raise InvalidModel(
            f"the baseline's vocabulary has {baseline_BTV.shape[-1]} tokens, the candidate's {candidate_BTV.shape[-1]}",
            field="vocab_size",
        )
    compared = []
    for row, window in enumerate(windows):
        before = slice(window.first - window.start - 1, window.stop - window.start - 1)
        baseline_NV, candidate_NV = baseline_BTV[row, before], candidate_BTV[row, before]
        for role, logits_NV in (("baseline", baseline_NV), ("candidate", candidate_NV)):
            check_finite(
                logits_NV, f"the {role} answers {{broken}} of the {window.predicted} tokens from {window.first} on"
            )
        compared.append(compare_logits(baseline_NV, candidate_NV, torch.tensor(ids[window.first : window.stop])))
    return compared


def compare_logits(baseline_NV: Tensor, candidate_NV: Tensor, targets_N: Tensor) -> Compared:
    """Figures of N tokens from the logits before them, in float64 whatever the logits' dtype, on the CPU.

    KL is 0 exactly for equal logits, and never negative.
    """
    targets_N = targets_N.to(baseline_NV.device)
    parts = []
    for start in range(0, len(targets_N), CHUNK_TOKENS):
        chunk = slice(start, start + CHUNK_TOKENS)
        p_CV, q_CV = (logits_NV[chunk].double().log_softmax(dim=-1) for logits_NV in (baseline_NV, candidate_NV))
        targets_C1 = targets_N[chunk, None]
        parts.append(
            Compared(
                baseline_nats=-p_CV.gather(1, targets_C1)[:, 0],
                candidate_nats=-q_CV.gather(1, targets_C1)[:, 0],
                kl=(p_CV.exp() * (p_CV - q_CV)).sum(dim=-1).clamp(min=0),
                baseline_top=baseline_NV[chunk].argmax(dim=-1),
                candidate_top=candidate_NV[chunk].argmax(dim=-1),
            )
        )
    return Compared(*(torch.cat(column).cpu() for column in zip(*parts, strict=True)))


def check_finite(logits_NV: Tensor, sentence: str) -> None:
    """InvalidModel where a row holds NaN or infinity; `sentence` says which model, and `{broken}` in it how many."""
    broken = int((~logits_NV.isfinite().all(dim=-1)).sum())
    if broken:
        raise InvalidModel(
            f"{sentence.format(broken=broken)} with NaN or infinity: look for overflow in the stage before its export",
            reason="NON_FINITE_LOGITS",
        )


def token_texts(tokens: Iterable[int], tokenizer: Any) -> Mapping[int, str]:
    """Each token as text; a token that is no text by itself, part of a character, has the replacement sign."""
    return {token: str(tokenizer.decode([token])) for token in sorted(tokens)}
