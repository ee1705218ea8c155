"""Questions with given choices: the model's answer is the choice whose tokens it finds most likely after the prompt.

The text that is scored is prompt + choice as they stand: a space between them is written in the dataset. A choice's
score is the mean of log p over its tokens, so that a long choice is not worse for being long. (`acc_norm` of
lm-evaluation-harness divides by bytes instead.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evaluators.language_models import LanguageModel, open_language_model
from evaluators.runtimes import Resources, read_config
from evaluators.token_comparison import CHUNK_TOKENS, ComparedModels, Progress, check_finite
from evaluators.token_windows import batches, check_vocabulary, check_window, common_tokens, padded
from evaluators.tokenization import load_tokenizer
from modelpress.errors import InvalidDataset
from modelpress.evaluations import LanguageEvaluation
from modelpress.intervals import accuracy_drop, share_interval
from modelpress.language_reports import ChoiceReport
from modelpress.language_rows import Question, read_language_rows
from modelpress.metrics import Metric, PairedCounts


@dataclass(frozen=True)
class EncodedChoice:
    """A prompt with one choice after it; the choice's tokens are ids[first:], and there is at least one before."""

    ids: list[int]
    first: int


def answer_questions(
    models: ComparedModels, *, data: Path, evaluation: LanguageEvaluation, resources: Resources, progress: Progress
) -> ChoiceReport | None:
    """Let both models answer the dataset's questions, one model open at a time; `progress` counts choices.

    None for a dataset without questions. The answers do not depend on `batch_size`, save where two choices score the
    same up to float rounding. Raises InvalidDataset naming the line of a choice that has no token of its own, or is
    longer with its prompt than the window.
    """
    questions = read_language_rows(data, evaluation).questions
    if not questions:
        return None
    config = read_config(models.baseline)
    check_window(evaluation.window, config)
    tokenizer = load_tokenizer(models.baseline)
    choices = [one for question in questions for one in encoded_choices(question, tokenizer, evaluation)]
    check_vocabulary((token for choice in choices for token in choice.ids), config)
    right = []
    for done, folder in enumerate((models.baseline, models.candidate)):
        shown = partial(_shifted, progress, done * len(choices), 2 * len(choices))
        scores = score(
            open_language_model(folder, resources), choices, batch_size=evaluation.batch_size, progress=shown
        )
        right.append(
            [answer == question.answer for answer, question in zip(answers(scores, questions), questions, strict=True)]
        )
    return choice_report(*right, confidence=evaluation.confidence)


def encoded_choices(question: Question, tokenizer: Any, evaluation: LanguageEvaluation) -> list[EncodedChoice]:
    """Each choice after the prompt. Its tokens are those behind what prompt and prompt + choice begin with in common:
    a token across the seam belongs to the choice.
    """
    prompt = tokenizer(question.prompt, verbose=False)["input_ids"]
    found = []
    for number, choice in enumerate(question.choices):
        ids = tokenizer(question.prompt + choice, verbose=False)["input_ids"]
        first = common_tokens(prompt, ids)
        where = f"{question.place.name}: choice {number} (from 0)"
        if first == len(ids):
            raise InvalidDataset(f"{where} adds no token to its prompt", field=evaluation.choices_column)
        if first == 0:
            raise InvalidDataset(f"{where} has no token of the prompt before it", field=evaluation.prompt_column)
        if len(ids) > evaluation.window:
            raise InvalidDataset(
                f"{where} has {len(ids)} tokens with its prompt, the window {evaluation.window}: shorten it, or set a "
                "longer window",
                field=evaluation.choices_column,
            )
        found.append(EncodedChoice(ids, first))
    return found


def score(
    model: LanguageModel, choices: Sequence[EncodedChoice], *, batch_size: int, progress: Progress
) -> list[float]:
    """Mean log p of each choice's tokens, in nats. Choices of like length share a batch, so that little is padded."""
    scores = [0.0] * len(choices)
    order = sorted(range(len(choices)), key=lambda index: len(choices[index].ids))
    done = 0
    for batch in batches(order, batch_size):
        logits_BTV = model.logits(*padded([choices[index].ids for index in batch]))
        for logits_TV, index in zip(logits_BTV, batch, strict=True):
            choice = choices[index]
            logits_NV = logits_TV[choice.first - 1 : len(choice.ids) - 1]
            check_finite(logits_NV, f"the model answers {{broken}} of the {len(logits_NV)} tokens of a choice")
            scores[index] = float(log_likelihoods(logits_NV, torch.tensor(choice.ids[choice.first :])).mean())
        done += len(batch)
        progress(done, len(choices))
    return scores


def log_likelihoods(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """log p [N] of each target, in float64 whatever the logits' dtype."""
    parts = []
    for start in range(0, len(targets_N), CHUNK_TOKENS):
        chunk = slice(start, start + CHUNK_TOKENS)
        wide_CV, targets_C1 = logits_NV[chunk].double(), targets_N[chunk, None].to(logits_NV.device)
        parts.append(wide_CV.gather(1, targets_C1)[:, 0] - wide_CV.logsumexp(dim=-1))
    return torch.cat(parts)


def answers(scores: Sequence[float], questions: Sequence[Question]) -> list[int]:
    """The number of each question's best choice, the first of equals; `scores` holds one question after the other."""
    found, start = [], 0
    for question in questions:
        own = scores[start : start + len(question.choices)]
        found.append(own.index(max(own)))
        start += len(own)
    return found


def choice_report(
    baseline_right: Sequence[bool], candidate_right: Sequence[bool], *, confidence: float
) -> ChoiceReport:
    """Accuracies with Wilson's interval, and their paired difference; one flag per question and model."""
    pairs = list(zip(baseline_right, candidate_right, strict=True))
    paired = PairedCounts(
        both_right=pairs.count((True, True)),
        only_baseline_right=pairs.count((True, False)),
        only_candidate_right=pairs.count((False, True)),
        both_wrong=pairs.count((False, False)),
    )
    return ChoiceReport(
        baseline_accuracy=_accuracy(sum(baseline_right), len(pairs), confidence),
        candidate_accuracy=_accuracy(sum(candidate_right), len(pairs), confidence),
        paired=paired,
        accuracy_drop=accuracy_drop(paired, confidence=confidence),
    )


def _accuracy(right: int, n: int, confidence: float) -> Metric:
    interval = share_interval(right, n, confidence=confidence)
    return Metric(name="accuracy", value=right / n, unit="fraction", n=n, interval=interval)


def _shifted(progress: Progress, before: int, total: int, done: int, _: int) -> None:
    progress(before + done, total)
