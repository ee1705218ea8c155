"""The losses and figures, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from compressors.batches import NO_LABEL, Batch, Examples
from compressors.distillation import (
    Outputs,
    distillation_loss,
    held_out_figures,
    hidden_state_mse,
    logits_forward,
    predict,
    softened_kl,
)
from modelpress.errors import InvalidRecipe
from modelpress.recipes import TrainingArguments

THREE_TO_ONE = torch.tensor([[math.log(3.0), 0.0]])
EVEN = torch.zeros(1, 2)
KL = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)  # of (3/4, 1/4) from (1/2, 1/2)


def batch(*, labels: tuple[int, ...] = (0,), mask: tuple[tuple[int, ...], ...] = ((1,),)) -> Batch:
    inputs = {"input_ids": torch.ones(len(mask), len(mask[0]), dtype=torch.int64), "attention_mask": torch.tensor(mask)}
    return Batch(inputs, torch.tensor(labels), tuple(range(len(mask))))


def test_kl_is_the_textbook_sum() -> None:
    assert float(softened_kl(THREE_TO_ONE, EVEN, temperature=1.0)) == pytest.approx(KL)
    assert float(softened_kl(EVEN, EVEN + 7, temperature=3.0)) == pytest.approx(0.0, abs=1e-7)


def test_temperature_divides_logits_and_scales_the_loss_by_its_square() -> None:
    assert float(softened_kl(THREE_TO_ONE * 2, EVEN, temperature=2.0)) == pytest.approx(4 * KL)


def test_kl_averages_over_examples() -> None:
    teacher, student = torch.cat([THREE_TO_ONE, EVEN]), torch.cat([EVEN, EVEN])

    assert float(softened_kl(teacher, student, temperature=1.0)) == pytest.approx(KL / 2)


def test_hidden_state_error_counts_real_tokens_only() -> None:
    teacher = [torch.zeros(1, 2, 2), torch.zeros(1, 2, 2)]
    student = [torch.tensor([[[1.0, 3.0], [100.0, 100.0]]]), torch.zeros(1, 2, 2)]

    # Token 0 counts, token 1 is padding: (1 + 9) over 2 layers x 1 token x 2 values.
    assert float(hidden_state_mse(teacher, student, torch.tensor([[1, 0]]))) == pytest.approx(10 / 4)


def test_the_loss_is_the_weighted_sum() -> None:
    teacher, student = Outputs(THREE_TO_ONE, (torch.zeros(1, 1, 2),)), Outputs(EVEN, (torch.ones(1, 1, 2),))
    arguments = TrainingArguments(kl_weight=2.0, hidden_state_weight=3.0, label_weight=5.0, temperature=1.0)

    loss = distillation_loss(teacher, student, batch(), arguments=arguments)
    assert float(loss) == pytest.approx(2 * KL + 3 * 1.0 + 5 * math.log(2))


def test_a_student_without_hidden_states_trains_on_the_rest() -> None:
    teacher, student = Outputs(THREE_TO_ONE, (torch.zeros(1, 1, 2),)), Outputs(EVEN)

    loss = distillation_loss(teacher, student, batch(), arguments=TrainingArguments(temperature=1.0))
    assert float(loss) == pytest.approx(KL)
    with pytest.raises(InvalidRecipe, match="no hidden states"):
        distillation_loss(teacher, student, batch(), arguments=TrainingArguments(kl_weight=0))


def rows(*lengths: int, labels: tuple[int, ...]) -> Examples:
    names = ("input_ids", "attention_mask")
    return Examples(tuple(tuple([5] * n) for n in lengths), labels, names, pad_id=0, max_length=9, truncated=0)


def test_predictions_come_in_dataset_order() -> None:
    count = logits_forward(lambda ids, mask: torch.stack([mask.sum(1).float(), ids[:, 0].float()], dim=1))

    assert predict(count, rows(4, 1, 3, labels=(0, 0, 0)))[:, 0].tolist() == [4.0, 1.0, 3.0]


def test_figures_are_counted_against_teacher_and_labels() -> None:
    teacher, student = torch.tensor([[2.0, 1.0], [2.0, 1.0]]), torch.tensor([[2.0, 1.0], [1.0, 2.0]])

    figures = held_out_figures(teacher, student, rows(1, 1, labels=(1, 1)))
    assert (figures["n"], figures["flips"], figures["accuracy"]) == (2.0, 1.0, 0.5)
    p = 1 / (1 + math.exp(-1))
    assert figures["kl"] == pytest.approx((2 * p - 1) / 2)
    assert "accuracy" not in held_out_figures(teacher, student, rows(1, 1, labels=(NO_LABEL, NO_LABEL)))
