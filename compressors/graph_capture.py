"""A model folder's forward pass as one `torch.export` graph: int64 [B, S] inputs by position, logits [B, C] out.

B examples, S tokens: both stay free, S up to the model's positions. The graph that is quantized and the graph that
is exported come from here, so that they are the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from compressors.batches import INPUT_ORDER

EXAMPLE_SHAPE = (2, 8)
PREFIX = "model."
"""In front of every parameter's name: the graph holds the model inside a wrapper."""


class LogitsOnly(nn.Module):
    """The model with positional inputs.

    The additive attention mask is made here, once and in plain arithmetic: transformers' own masking code
    exports to fifteen gathers and comparisons. Its values are the same: 0 where a token counts, the lowest
    float where it does not.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        mask_B11S = (1.0 - attention_mask[:, None, None, :].to(torch.float32)) * torch.finfo(torch.float32).min
        logits: Tensor = self.model(input_ids, attention_mask=mask_B11S, token_type_ids=token_type_ids).logits
        return logits


def input_names(config: Any) -> tuple[str, ...]:
    """What the graph takes, in order: `token_type_ids` only where the model tells segments apart."""
    return INPUT_ORDER if getattr(config, "type_vocab_size", 0) > 1 else INPUT_ORDER[:2]


def example_inputs(config: Any) -> dict[str, Tensor]:
    """Inputs to trace with: a tensor object of its own each, since one object given twice becomes one input."""
    ids = torch.arange(EXAMPLE_SHAPE[0] * EXAMPLE_SHAPE[1], dtype=torch.int64).reshape(EXAMPLE_SHAPE)
    mask = torch.ones(EXAMPLE_SHAPE, dtype=torch.int64)
    mask[-1, EXAMPLE_SHAPE[1] // 2 :] = 0
    values = (ids % config.vocab_size, mask, torch.zeros(EXAMPLE_SHAPE, dtype=torch.int64))
    return dict(zip(input_names(config), values, strict=False))


def dynamic_shapes(config: Any) -> tuple[Any, ...]:
    """The two free dimensions of every input of `capture`."""
    batch, sequence = torch.export.Dim("batch"), torch.export.Dim("sequence", max=config.max_position_embeddings)
    return tuple({0: batch, 1: sequence} for _ in input_names(config))


def capture(model: Any) -> torch.fx.GraphModule:
    """The graph of `model` in eval mode: every dropout is fixed off, so no later mode switch can turn it on."""
    with known_warnings():
        program = torch.export.export(
            LogitsOnly(model.eval()).eval(),
            tuple(value.to(model.device) for value in example_inputs(model.config).values()),
            dynamic_shapes=dynamic_shapes(model.config),
        )
        return program.module()


@contextmanager
def known_warnings() -> Iterator[None]:
    """Leave out exactly those warnings of torch's exporters that say nothing about the model."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)", FutureWarning)
        warnings.filterwarnings("ignore", r"# The axis name: \w+ will not be used", UserWarning)
        yield
