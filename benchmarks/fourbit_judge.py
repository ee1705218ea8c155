"""`python -m benchmarks.fourbit_judge BASE CANDIDATE TEXTS`: perplexity, token KL and top-1 agreement, by evaluators.

8,192 tokens of the texts, in windows of 512: 8,176 are predicted.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from benchmarks.processes import clock, say
from evaluators.language_models import open_language_model
from evaluators.runtimes import Resources
from evaluators.token_comparison import Compared, compare_windows
from evaluators.token_windows import batches, cut_windows, text_tokens
from evaluators.tokenization import load_tokenizer
from modelpress.evaluations import LanguageEvaluation
from modelpress.language_rows import read_language_rows

TOKENS, WINDOW, BATCH = 8192, 512, 4


def main(base: str, candidate: str, texts: str) -> None:
    begun = clock()
    torch.set_num_threads(1)
    rows = read_language_rows(Path(texts), LanguageEvaluation()).texts
    ids = text_tokens([row.text for row in rows], load_tokenizer(Path(base)))[:TOKENS]
    pair = [open_language_model(Path(folder), Resources()) for folder in (base, candidate)]
    compared: list[Compared] = []
    for windows in batches(cut_windows(TOKENS, window=WINDOW, stride=WINDOW), BATCH):
        compared += compare_windows(pair, ids=ids, windows=windows)
        columns = Compared(*(torch.cat(column) for column in zip(*compared, strict=True)))
    say(
        begun,
        baseline_perplexity=columns.baseline_nats.mean().exp().item(),
        perplexity=columns.candidate_nats.mean().exp().item(),
        token_kl=columns.kl.mean().item(),
        top1=(columns.baseline_top == columns.candidate_top).double().mean().item(),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
