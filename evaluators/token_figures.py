"""What two models said of the same tokens, kept so that nothing is measured twice. Logits are not among it.

Shapes: N predicted tokens, in their order; W windows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from modelpress.canonical import canonical_json
from modelpress.errors import DataLoss, InvalidModel, InvalidRequest

TENSORS_FILE = "token_figures.safetensors"
FACTS_FILE = "token_figures.json"


@dataclass(frozen=True, eq=False)
class TokenFigures:
    """Figures of every predicted token, valid once built.

    Nats are -log p(token), KL is that of baseline || candidate over the whole vocabulary, both of natural logarithms;
    `_top` is the id of the most likely token, the first of equals. `window_tokens` [W] counts each window's tokens.
    """

    baseline_nats: NDArray[np.float64]
    candidate_nats: NDArray[np.float64]
    kl: NDArray[np.float64]
    baseline_top: NDArray[np.int64]
    candidate_top: NDArray[np.int64]
    window_tokens: NDArray[np.int64]
    facts: TokenFacts

    def __post_init__(self) -> None:
        n, windows = len(self.kl), self.window_tokens
        lengths = {len(getattr(self, name)) for name in PER_TOKEN}
        if lengths != {n} or not n or windows.sum() != n or windows.min() < 1:
            raise InvalidRequest("the token figures do not fit together: one of each kind per token of each window")
        if not all(np.isfinite(getattr(self, name)).all() for name in PER_TOKEN):
            raise InvalidModel("a token's figures are NaN or infinite", reason="NON_FINITE_LOGITS")

    def __len__(self) -> int:
        return len(self.kl)

    @property
    def starts(self) -> NDArray[np.int64]:
        """Position [W] of each window's first predicted token among all predicted ones."""
        starts: NDArray[np.int64] = np.cumsum(self.window_tokens) - self.window_tokens
        return starts

    @property
    def agree(self) -> NDArray[np.bool_]:
        """Whether [N] both models have the same most likely token."""
        agree: NDArray[np.bool_] = self.baseline_top == self.candidate_top
        return agree

    def save(self, folder: Path) -> None:
        """Write into an existing folder; equal figures give equal bytes."""
        save_file({name: np.ascontiguousarray(getattr(self, name)) for name in TENSORS}, folder / TENSORS_FILE)
        facts = {**vars(self.facts), "answers": {str(token): text for token, text in self.facts.answers.items()}}
        (folder / FACTS_FILE).write_bytes(canonical_json(facts))


@dataclass(frozen=True)
class TokenFacts:
    """How the figures came about. `answers` gives the text of every token that is a most likely one."""

    baseline_runtime: str
    candidate_runtime: str
    window: int
    stride: int
    answers: Mapping[int, str]


TENSORS = tuple(field.name for field in fields(TokenFigures) if field.name != "facts")
PER_TOKEN = tuple(name for name in TENSORS if name != "window_tokens")

UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, SafetensorError)
"""What reading a damaged file raises."""


def load_token_figures(folder: Path) -> TokenFigures:
    """Read back what `save` wrote, bit for bit. Raises DataLoss on anything else."""
    try:
        facts = json.loads((folder / FACTS_FILE).read_bytes())
        facts["answers"] = {int(token): text for token, text in facts["answers"].items()}
        tensors = load_file(folder / TENSORS_FILE)
        return TokenFigures(**{name: tensors[name] for name in TENSORS}, facts=TokenFacts(**facts))
    except (*UNREADABLE, InvalidRequest, InvalidModel) as error:
        raise DataLoss("stored token figures cannot be read: measure them again") from error
