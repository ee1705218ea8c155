"""The training loop that `recover` and `quantize` share: distil a teacher into a student, keep the best.

    result = distil(Distillation(student, teacher, train, held_out, arguments, seed), monitor)

Laws, on the CPU with one thread count: equal inputs give equal bytes; a run that is interrupted anywhere and
resumed from its checkpoint ends with the bytes of an undisturbed one; the student's held-out KL afterwards is at
most what it was before. Only parameters with `requires_grad` (and buffers) change. Dropout stays off: the run
is short and the teacher's soft targets regularise it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from compressors.batches import Batch, Examples, collate, encode, shuffled_batches, spread
from compressors.checkpoints import (
    Checkpoint,
    grouped,
    load_optimizer,
    load_random_states,
    load_trained_state,
    optimizer_tensors,
    random_states,
    read_checkpoint,
    trained_state,
    write_checkpoint,
)
from compressors.distillation import Forward, distillation_loss, gives_hidden_states, held_out_figures, predict
from compressors.optimization import MAX_GRADIENT_NORM, autocast, learning_rate, make_optimizer
from compressors.stages import Data, Monitor, Progress
from compressors.standing import Standing
from modelpress.canonical import canonical_json
from modelpress.digests import digest_bytes
from modelpress.errors import InvalidRecipe
from modelpress.recipes import TrainingArguments
from modelpress.reports import CurvePoint

HELD_OUT_ROWS = 1024
"""Held-out rows that a training stage looks at, evenly spaced: a look costs seconds, and there are many."""
CURVE_POINTS = 60


@dataclass(frozen=True)
class Student:
    """`module` holds what is trained and checkpointed; `forward` runs it. The caller sets its mode.

    Looks at the held-out split run `forward` in inference mode: there it must change no state of the module.
    """

    module: nn.Module
    forward: Forward

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained, by name."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}


@dataclass(frozen=True)
class Distillation:
    """Everything that decides how a training run ends."""

    student: Student
    teacher: Forward
    train: Examples
    held_out: Examples
    arguments: TrainingArguments
    seed: int
    device: str = "cpu"

    def __post_init__(self) -> None:
        arguments = self.arguments
        if arguments.label_weight and not self.train.labelled:
            raise InvalidRecipe("label_weight needs labelled training data: set it to 0", field="label_weight")
        if not (arguments.kl_weight or arguments.hidden_state_weight or arguments.label_weight):
            raise InvalidRecipe("kl_weight, hidden_state_weight and label_weight are all 0: nothing would be trained")
        if arguments.mixed_precision == "bfloat16" and not self.device.startswith("cuda"):
            raise InvalidRecipe(
                f"mixed_precision bfloat16 needs CUDA, this stage runs on {self.device}: use auto or float32",
                field="mixed_precision",
            )

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What must be equal for a checkpoint to be resumed."""
        return {
            "arguments": self.arguments.model_dump(mode="json"),
            "seed": self.seed,
            "threads": torch.get_num_threads(),
            "device": self.device.split(":")[0],
            "data": str(digest_bytes(canonical_json([self.train.token_ids, self.held_out.token_ids]))),
            "shapes": {name: list(p.shape) for name, p in self.student.parameters.items()},
        }


@dataclass(frozen=True)
class TrainingResult:
    """Held-out figures before and after, the loss curve, and what a record should say besides."""

    before: dict[str, float]
    after: dict[str, float]
    curve: tuple[CurvePoint, ...]
    best_step: int
    """0: no look was better than the start, which is what the student then holds again."""
    details: dict[str, Any]
    warnings: tuple[str, ...]


def distil(task: Distillation, monitor: Monitor) -> TrainingResult:
    """Train the student, resuming from `monitor.checkpoint()`; leave it with the weights of its best look.

    Raises InvalidRecipe where the loss becomes NaN or infinite, FailedPrecondition for a checkpoint of another run.
    """
    cuda = [task.device] if task.device.startswith("cuda") else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(task.seed)
        trainer = _Trainer(task)
        folder = monitor.checkpoint()
        if folder is not None:
            trainer.restore(read_checkpoint(folder, identity=task.identity))
        while trainer.standing.step < task.arguments.steps:
            trainer.step()
            step, last = trainer.standing.step, trainer.standing.step == task.arguments.steps
            if last or step % task.arguments.checkpoint_every == 0:
                trainer.look()
                monitor.save_checkpoint(step, lambda folder: write_checkpoint(trainer.checkpoint(), folder))
            monitor.progress(trainer.progress())
        return trainer.finish()


def encode_data(data: Data, tokenizer: Any, *, config: Any, max_length: int) -> tuple[Examples, Examples]:
    """Training rows and at most HELD_OUT_ROWS held-out rows, encoded."""
    train = encode(data.train, tokenizer, config=config, max_length=max_length)
    held_out = encode(data.held_out, tokenizer, config=config, max_length=max_length)
    return train, spread(held_out, limit=HELD_OUT_ROWS)


class _Trainer:
    """One run: the student, its optimizer, its best state so far and its standing."""

    def __init__(self, task: Distillation) -> None:
        self.task = task
        self.optimizer = make_optimizer(task.student.parameters.values(), task.arguments)
        self.order = self._order(first=0)
        self.reference = predict(task.teacher, task.held_out, device=task.device)
        before = self.measure()
        self.best_state = trained_state(task.student.module)
        self.standing = Standing.at_start(before)

    def measure(self) -> dict[str, float]:
        with autocast(self.task.arguments, self.task.device):
            logits = predict(self.task.student.forward, self.task.held_out, device=self.task.device)
        return held_out_figures(self.reference, logits, self.task.held_out)

    def step(self) -> None:
        """One optimizer step over `gradient_accumulation` batches."""
        arguments, standing = self.task.arguments, self.standing
        rate = learning_rate(
            standing.step,
            steps=arguments.steps,
            peak=arguments.learning_rate,
            warmup_fraction=arguments.warmup_fraction,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        rows = islice(self.order, arguments.gradient_accumulation)
        losses = [self._backward(collate(self.task.train, part, device=self.task.device)) for part in rows]
        norm = nn.utils.clip_grad_norm_(self.task.student.parameters.values(), MAX_GRADIENT_NORM)
        self._check_finite(norm, "gradient norm")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        points_every = max(1, arguments.steps // CURVE_POINTS)
        self.standing = standing.after_step(sum(losses) / len(losses), points_every=points_every)

    def look(self) -> None:
        """Measure the held-out split, and keep the student's state where it is the best so far."""
        self.standing = self.standing.after_look(self.measure())
        if self.standing.best_step == self.standing.step:
            self.best_state = trained_state(self.task.student.module)

    def progress(self) -> Progress:
        standing, steps = self.standing, self.task.arguments.steps
        return Progress(step=standing.step, steps=steps, loss=standing.loss, figures=dict(standing.best))

    def checkpoint(self) -> Checkpoint:
        weights = trained_state(self.task.student.module)
        tensors = grouped(weights=weights, best=self.best_state, rng=random_states(self.task.device))
        moments = optimizer_tensors(self.optimizer, self.task.student.parameters)
        return Checkpoint(tensors | moments, {"identity": self.task.identity, "standing": self.standing.to_json()})

    def restore(self, checkpoint: Checkpoint) -> None:
        load_trained_state(self.task.student.module, checkpoint.group("weights"))
        load_optimizer(self.optimizer, self.task.student.parameters, checkpoint)
        load_random_states(checkpoint.group("rng"), device=self.task.device)
        self.best_state = checkpoint.group("best")
        self.standing = Standing.from_json(checkpoint.facts["standing"])
        self.order = self._order(first=self.standing.step * self.task.arguments.gradient_accumulation)

    def finish(self) -> TrainingResult:
        """Put the best state back and say how the run went."""
        load_trained_state(self.task.student.module, self.best_state)
        return TrainingResult(
            before=dict(self.standing.before),
            after=dict(self.standing.best),
            curve=self.standing.curve,
            best_step=self.standing.best_step,
            details=_details(self.task, self.standing),
            warnings=_warnings(self.task),
        )

    def _order(self, *, first: int) -> Iterator[tuple[int, ...]]:
        """Rows of batch `first`, `first + 1`, ...: the position in the data follows from the step alone."""
        order = shuffled_batches(self.task.train, batch_size=self.task.arguments.batch_size, seed=self.task.seed)
        return islice(order, first, None)

    def _backward(self, batch: Batch) -> float:
        task = self.task
        with autocast(task.arguments, task.device):
            with torch.inference_mode():
                teacher = task.teacher(batch)
            student = task.student.forward(batch)
        loss = distillation_loss(teacher, student, batch, arguments=task.arguments)
        self._check_finite(loss, "loss")
        torch.autograd.backward(loss / task.arguments.gradient_accumulation)
        return float(loss.detach())

    def _check_finite(self, value: Tensor, name: str) -> None:
        if not torch.isfinite(value):
            arguments = self.task.arguments
            raise InvalidRecipe(
                f"the {name} became {float(value.detach())} at step {self.standing.step + 1} of {arguments.steps}: "
                f"lower learning_rate (now {arguments.learning_rate})",
                reason="TRAINING_DIVERGED",
                field="learning_rate",
            )


def _details(task: Distillation, standing: Standing) -> dict[str, Any]:
    rows = task.arguments.steps * task.arguments.gradient_accumulation * task.arguments.batch_size
    return {
        "best_step": standing.best_step,
        "kept_by": "lowest kl on the held-out rows, the start included",
        "trained_parameters": sum(p.numel() for p in task.student.parameters.values()),
        "train_rows": len(task.train),
        "epochs": round(rows / len(task.train), 2),
        "held_out_rows": len(task.held_out),
    }


def _warnings(task: Distillation) -> tuple[str, ...]:
    cut, limit = task.train.truncated, task.train.max_length
    found = [f"{cut} training texts were cut at {limit} tokens"] if cut else []
    if limit < task.arguments.max_length:
        found.append(f"max_length {task.arguments.max_length} is more than the model's positions: {limit} was used")
    wanted = task.arguments.hidden_state_weight > 0
    if wanted and not gives_hidden_states(task.student.forward, task.held_out, device=task.device):
        found.append("hidden_state_weight was not used: the student gives no hidden states")
    return tuple(found)
