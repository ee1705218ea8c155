"""The hidden states of every calibration window, on disk: one batch of windows in memory.

    activations = Activations.embed(ids_NT, decoder.embedding(), path=scratch / "0", device=device)
    activations = activations.through(layer, path=scratch / "1")

Shapes: N windows in all, B windows of a batch, T tokens, H hidden width. On disk: float32, [N, T, H].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from modelpress.errors import InternalError

BATCH_TOKENS = 4096
"""Of one forward pass; a window with more tokens is a batch of its own."""

Run = Callable[[Tensor], Tensor]


class NonFiniteError(ValueError):
    """NaN or infinite hidden states came out."""


@dataclass(frozen=True)
class Activations:
    """`LayerInputs` of `compressors.layer_algorithms`."""

    path: Path
    shape: tuple[int, int, int]
    """N, T, H."""
    device: torch.device

    @staticmethod
    def embed(ids_NT: Tensor, embed: Run, *, path: Path, device: torch.device) -> Activations:
        """Write what `embed` makes [B, T, H] of tokens [B, T]. Raises NonFiniteError."""
        windows, tokens = ids_NT.shape
        width = _write(path, map(embed, torch.split(ids_NT, batch_windows(tokens))))
        return Activations(path, (windows, tokens, width), device)

    def through(self, run: Run, *, path: Path) -> Activations:
        """Write what `run` makes of each batch, and delete this file. Raises NonFiniteError."""
        _write(path, map(run, self.batches(batch_windows(self.tokens))))
        self.path.unlink()
        return Activations(path, self.shape, self.device)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def tokens(self) -> int:
        """Of each window."""
        return self.shape[1]

    def batches(self, size: int) -> Iterator[Tensor]:
        """Hidden states [B, T, H] in float32 on the device, B at most `size`, in the windows' order."""
        with self.path.open("rb") as file:
            for first in range(0, len(self), size):
                yield self._read(file, range(first, min(first + size, len(self))))

    def windows(self, indices: Tensor) -> Tensor:
        """The hidden states [B, T, H] of these windows."""
        with self.path.open("rb") as file:
            return self._read(file, indices.tolist())

    def _read(self, file: BinaryIO, indices: range | list[int]) -> Tensor:
        hidden_BTH = torch.empty(len(indices), *self.shape[1:])
        for row_TH, index in zip(hidden_BTH, indices, strict=True):
            file.seek(index * row_TH.nbytes)
            if file.readinto(row_TH.numpy().data) != row_TH.nbytes:  # type: ignore[attr-defined]
                raise InternalError(f"the hidden states of window {index} end too early on disk")
        return hidden_BTH.to(self.device)


def batch_windows(tokens: int) -> int:
    """Windows of so many tokens that make one batch."""
    return max(1, BATCH_TOKENS // tokens)


def _write(path: Path, batches: Iterator[Tensor]) -> int:
    """Returns the hidden width H."""
    width = 0
    with path.open("wb") as file:
        for batch_BTH in batches:
            if not torch.isfinite(batch_BTH).all():
                raise NonFiniteError
            width = batch_BTH.shape[-1]
            file.write(batch_BTH.to("cpu", torch.float32).contiguous().numpy().data)
    return width
