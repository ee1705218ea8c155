"""Recovery training: distil the unpruned teacher into the pruned student."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from compressors.distillation import model_forward
from compressors.families import family_of
from compressors.folders import left_out_warnings, load_model, load_tokenizer, read_config, save_model, stored_dtypes
from compressors.stages import Data, Job, Monitor
from compressors.training import Distillation, Student, distil, encode_data
from modelpress.errors import FailedPrecondition, InvalidRecipe
from modelpress.recipes import Recover
from modelpress.reports import StageRecord

VERSION = 3


def run(arguments: Recover, job: Job, monitor: Monitor) -> StageRecord:
    """Train everything but the embeddings, which pruning left alone, and keep the best look.

    Raises InvalidRecipe without data, teacher or steps, FailedPrecondition where no look was better than the start.
    """
    data, teacher = _inputs(arguments, job)
    student = load_model(job.model, device=job.device)
    freeze(student, modules=family_of(read_config(job.model)).embeddings)
    if arguments.activation_checkpointing:
        enable_activation_checkpointing(student)
    train, held_out = encode_data(
        data, load_tokenizer(job.model), config=student.config, max_length=arguments.max_length
    )
    start = _copies(student)
    result = distil(
        Distillation(
            student=Student(student, model_forward(student)),
            teacher=model_forward(teacher),
            train=train,
            held_out=held_out,
            arguments=arguments,
            seed=job.seed,
            device=job.device,
        ),
        monitor,
    )
    if not result.best_step:
        raise FailedPrecondition(
            f"recovery gained nothing: no look in {arguments.steps} steps had a lower held-out KL than the start's "
            f"{result.before['kl']:.3g}; change learning_rate or steps, or leave the stage out",
            reason="NOTHING_RECOVERED",
        )
    save_model(student, source=job.model, output=job.output)
    return StageRecord(
        method="recover",
        arguments=arguments.model_dump(mode="json"),
        version=VERSION,
        touched=tuple(name for name, tensor in student.state_dict().items() if not torch.equal(start[name], tensor)),
        before=result.before,
        after=result.after,
        curve=result.curve,
        details={**result.details, "data": data.provenance},
        warnings=(*result.warnings, *_rounding_warning(job), *left_out_warnings(job.model)),
    )


def freeze(model: nn.Module, *, modules: tuple[str, ...]) -> None:
    """Keep the parameters of these modules as they are."""
    for name in modules:
        model.get_submodule(name).requires_grad_(False)


def enable_activation_checkpointing(model: Any) -> None:
    """Recompute each layer's activations in the backward pass (Chen et al. 2016): same gradients, less memory.

    transformers does it in training mode only, so the dropouts are set to 0 to keep the forward pass what it was.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    model.train()


def _inputs(arguments: Recover, job: Job) -> tuple[Data, Any]:
    if job.data is None:
        raise InvalidRecipe("recover needs training data: add a training dataset to the request", field="recover")
    if job.teacher is None:
        raise InvalidRecipe("recover needs a teacher: the model before pruning", field="recover")
    if not arguments.steps:
        raise InvalidRecipe("recover with 0 steps would do nothing: set steps, or leave the stage out", field="steps")
    return job.data, load_model(job.teacher, device=job.device)


def _rounding_warning(job: Job) -> tuple[str, ...]:
    narrow = sorted({str(dtype) for dtype in stored_dtypes(job.model).values()} - {"torch.float32"})
    return tuple(
        f"figures after are those of the FP32 weights, before they were rounded to {dtype}" for dtype in narrow
    )


def _copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
