"""Importance scores: Taylor's is the Fisher information of a gate on the neuron, computed here gate by gate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from compressors import importance
from compressors.batches import NO_LABEL, Examples, collate
from compressors.folders import load_model

PAIRS = tuple((f"bert.encoder.layer.{i}.intermediate.dense", f"bert.encoder.layer.{i}.output.dense") for i in (0, 1))
ROWS = Examples(
    token_ids=((2, 7, 9, 3), (2, 11, 3), (2, 5, 6, 8, 40, 3)),
    label_ids=(NO_LABEL,) * 3,
    input_names=("input_ids", "attention_mask"),
    pad_id=0,
    max_length=8,
    truncated=0,
)


def gate_gradients(model, layer: int, row: int) -> Tensor:
    """d log p(c) / d gate at gates of 1, for every class c and neuron: [C, N]."""

    def log_p(gates: Tensor) -> Tensor:
        hook = model.get_submodule(PAIRS[layer][1]).register_forward_pre_hook(lambda _, inputs: (inputs[0] * gates,))
        logits = model(**collate(ROWS, (row,)).inputs).logits
        hook.remove()
        return logits.log_softmax(-1)[0]

    return torch.autograd.functional.jacobian(log_p, torch.ones(32))


def test_taylor_is_the_expected_squared_gate_gradient(bert: Path) -> None:
    model = load_model(bert)
    scores = importance.taylor(model, PAIRS, ROWS)

    for layer in (0, 1):
        expected = torch.zeros(32)
        for row in range(3):
            with torch.no_grad():
                p_C = model(**collate(ROWS, (row,)).inputs).logits.softmax(-1)[0]
            expected += (p_C[:, None] * gate_gradients(model, layer, row).square()).sum(0) / 3
        assert torch.allclose(scores[layer], expected, rtol=1e-4, atol=1e-8)


def test_half_of_taylor_is_the_divergence_that_a_faded_neuron_costs(bert: Path) -> None:
    """KL(p || p with the gate at 1 - e) = e^2 / 2 * score, to second order."""
    model, fade = load_model(bert).double(), 1e-3
    score = importance.taylor(model, PAIRS, ROWS)[1]
    neuron = int(score.argmax())
    with torch.no_grad():
        before = [model(**collate(ROWS, (row,)).inputs).logits.log_softmax(-1)[0] for row in range(3)]
        model.get_submodule(PAIRS[1][1]).weight[:, neuron] *= 1 - fade
        after = [model(**collate(ROWS, (row,)).inputs).logits.log_softmax(-1)[0] for row in range(3)]

    divergence = sum(float((p.exp() * (p - q)).sum()) for p, q in zip(before, after, strict=True)) / 3
    assert divergence == pytest.approx(fade**2 / 2 * float(score[neuron]), rel=2e-2)


def test_a_neuron_that_nobody_reads_scores_zero(bert: Path) -> None:
    model = load_model(bert)
    with torch.no_grad():
        model.get_submodule(PAIRS[0][1]).weight[:, 5] = 0

    scores = importance.taylor(model, PAIRS, ROWS)[0]
    assert int(scores.argmin()) == 5 and float(scores[5]) == 0.0


def test_magnitude_is_the_norm_of_row_bias_and_column() -> None:
    ffn_in, ffn_out = torch.nn.Linear(2, 1), torch.nn.Linear(1, 2)
    with torch.no_grad():
        ffn_in.weight.copy_(torch.tensor([[1.0, 2.0]]))
        ffn_in.bias.copy_(torch.tensor([2.0]))
        ffn_out.weight.copy_(torch.tensor([[0.0], [4.0]]))

    assert importance.group_norm(ffn_in, ffn_out).tolist() == [5.0]


def test_scoring_leaves_the_model_alone(bert: Path) -> None:
    model, expected = load_model(bert), load_model(bert).state_dict()
    importance.taylor(model, PAIRS, ROWS)

    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())
