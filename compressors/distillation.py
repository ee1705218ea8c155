"""Knowledge distillation: the losses that pull a student to its teacher, and the figures that say how close it is.

Shapes: B examples, S tokens, H hidden width, C classes.
Hinton, Vinyals, Dean 2015 (softened KL); Jiao et al. 2019, TinyBERT (hidden states).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from compressors.batches import Batch, Examples, collate, ordered_batches
from modelpress.errors import InvalidRecipe
from modelpress.recipes import TrainingArguments

MEASURING_BATCH_SIZE = 64


@dataclass(frozen=True)
class Outputs:
    """`logits` [B, C]; `hidden_states`: embeddings and each layer, [B, S, H], empty where a model gives none."""

    logits: Tensor
    hidden_states: tuple[Tensor, ...] = ()


Forward = Callable[[Batch], Outputs]
"""One forward pass. Mode (train, eval), gradients and autocast are the caller's."""


def model_forward(model: Any) -> Forward:
    """Forward of a transformers model, with hidden states."""

    def forward(batch: Batch) -> Outputs:
        output = model(**batch.inputs, output_hidden_states=True, return_dict=True)
        return Outputs(output.logits, tuple(output.hidden_states))

    return forward


def logits_forward(module: Callable[..., Any]) -> Forward:
    """Forward of a module that takes the inputs by position and returns logits (alone, or first in a tuple)."""

    def forward(batch: Batch) -> Outputs:
        output = module(*batch.inputs.values())
        return Outputs(output if isinstance(output, Tensor) else output[0])

    return forward


def softened_kl(teacher_BC: Tensor, student_BC: Tensor, *, temperature: float) -> Tensor:
    """T^2 * mean over B of KL(softmax(teacher / T) || softmax(student / T)), in nats; 0 where both agree."""
    teacher = log_softmax(teacher_BC / temperature, dim=-1)
    student = log_softmax(student_BC / temperature, dim=-1)
    return kl_div(student, teacher, reduction="batchmean", log_target=True) * temperature**2


def hidden_state_mse(teacher: Sequence[Tensor], student: Sequence[Tensor], mask_BS: Tensor) -> Tensor:
    """Mean squared error over the hidden states, each [B, S, H], counting only tokens where the mask is 1."""
    mask_BS1 = mask_BS.unsqueeze(-1).float()
    squares = [((t.float() - s.float()).square() * mask_BS1).sum() for t, s in zip(teacher, student, strict=True)]
    return torch.stack(squares).sum() / (len(squares) * mask_BS1.sum() * teacher[0].shape[-1])


def distillation_loss(teacher: Outputs, student: Outputs, batch: Batch, *, arguments: TrainingArguments) -> Tensor:
    """The weighted sum of the losses whose weight is not 0; hidden states only where both models give them."""
    terms = []
    if arguments.kl_weight:
        terms.append(
            arguments.kl_weight
            * softened_kl(teacher.logits.float(), student.logits.float(), temperature=arguments.temperature)
        )
    if arguments.hidden_state_weight and student.hidden_states:
        mse = hidden_state_mse(teacher.hidden_states, student.hidden_states, batch.inputs["attention_mask"])
        terms.append(arguments.hidden_state_weight * mse)
    if arguments.label_weight:
        terms.append(arguments.label_weight * cross_entropy(student.logits.float(), batch.labels))
    if not terms:
        raise InvalidRecipe(
            "only hidden_state_weight is above 0, and this student gives no hidden states: set kl_weight",
            field="kl_weight",
        )
    return torch.stack(terms).sum()


@torch.inference_mode()
def gives_hidden_states(forward: Forward, examples: Examples, *, device: str = "cpu") -> bool:
    return bool(forward(collate(examples, (0,), device=device)).hidden_states)


@torch.inference_mode()
def predict(forward: Forward, examples: Examples, *, device: str = "cpu") -> Tensor:
    """FP32 logits of every example, [N, C], in dataset order, on the CPU."""
    rows: list[int] = []
    logits = []
    for part in ordered_batches(examples, batch_size=MEASURING_BATCH_SIZE):
        rows += part
        logits.append(forward(collate(examples, part, device=device)).logits.float().cpu())
    stacked = torch.cat(logits)
    return torch.empty_like(stacked).index_copy_(0, torch.tensor(rows), stacked)


def held_out_figures(teacher_NC: Tensor, student_NC: Tensor, examples: Examples) -> dict[str, float]:
    """`kl` (mean, nats, T = 1) and `flips` (count) against the teacher, `n`, and `accuracy` where rows have labels."""
    predicted_N = student_NC.argmax(-1)
    figures = {
        "n": float(len(examples)),
        "kl": float(softened_kl(teacher_NC.double(), student_NC.double(), temperature=1.0)),
        "flips": float((predicted_N != teacher_NC.argmax(-1)).sum()),
    }
    if examples.labelled:
        figures["accuracy"] = float((predicted_N == torch.tensor(examples.label_ids)).double().mean())
    return figures
