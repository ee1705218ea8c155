"""Quantization-aware training of a whole decoder: every linear layer on the grid that ships, distilled from the float
model.

    result = train(QatTask(teacher, weights, ids_NT, training, seed), monitor)

The loss is the Kullback-Leibler divergence of the student's next-token distribution from the teacher's, mean over the
tokens; a step computes its products in the device's fastest type. Trained are the weights and steps of the layers in
`weights`; the rest stays. Activations are not rounded, also where the scheme rounds them while the model runs (`w8a8`).
Equal inputs, seed, thread count and type of products give equal bytes, also where a run is killed and goes on from its
checkpoint; one that was written with another type of products is refused.

Shapes: N windows, B of a step, T tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compressors.checkpoints import (
    Checkpoint,
    grouped,
    load_optimizer,
    load_trained_state,
    optimizer_tensors,
    read_checkpoint,
    trained_state,
    write_checkpoint,
)
from compressors.compute_types import fastest_products, products_dtype
from compressors.learned_grid import put_on_grid, rounded_once
from compressors.optimization import MAX_GRADIENT_NORM, learning_rate
from compressors.stages import Monitor, Progress
from compressors.token_divergence import mean_divergence
from compressors.weight_layouts import AnyWeight
from modelpress.canonical import canonical_json
from modelpress.digests import digest_bytes
from modelpress.errors import InvalidRecipe
from modelpress.quantization_recipes import WeightTraining

LEARNING_RATE = 2e-4
WARMUP = 0.05
"""Share of the steps in which the rate rises."""
LOOK_WINDOWS = 8
"""Windows, the first ones, on which the start and the end are compared."""


@dataclass(frozen=True, eq=False)
class QatTask:
    """`teacher` is the float model, a transformers causal LM in evaluation mode, which training changes: its linear
    layers hold their weights in the type of the products. `weights` are what they start from, by their full names.
    """

    teacher: nn.Module
    weights: Mapping[str, AnyWeight]
    ids_NT: Tensor
    training: WeightTraining
    seed: int

    @property
    def identity(self) -> dict[str, Any]:
        """What must be equal for a checkpoint to be resumed."""
        return {
            "arguments": self.training.model_dump(mode="json"),
            "seed": self.seed,
            "threads": torch.get_num_threads(),
            "device": self.ids_NT.device.type,
            "products": str(products_dtype(self.ids_NT.device)),
            "data": str(digest_bytes(canonical_json(self.ids_NT.tolist()))),
            "shapes": {name: list(weight.codes_OI.shape) for name, weight in self.weights.items()},
        }


@dataclass(frozen=True, eq=False)
class QatResult:
    """The divergence on LOOK_WINDOWS windows before, and that of `weights`: where training did not lower it, they are
    the start's and the two are equal.
    """

    weights: dict[str, AnyWeight]
    before: float
    after: float


def train(task: QatTask, monitor: Monitor) -> QatResult:
    """Train from the newest checkpoint, or from the start. InvalidRecipe where the loss becomes NaN or infinite."""
    trainer = _Trainer(task)
    before = trainer.look()
    folder = monitor.checkpoint()
    if folder is not None:
        trainer.restore(read_checkpoint(folder, identity=task.identity))
    while trainer.step < task.training.steps:
        loss = trainer.advance()
        if trainer.step % task.training.checkpoint_every == 0:
            monitor.save_checkpoint(trainer.step, lambda folder: write_checkpoint(trainer.checkpoint(), folder))
        monitor.progress(Progress(step=trainer.step, steps=task.training.steps, loss=loss))
    after = trainer.look()
    if not after < before:
        return QatResult(dict(task.weights), before, before)
    return QatResult({name: layer.quantized() for name, layer in trainer.layers.items()}, before, after)


class _Trainer:
    """One run: the student, its optimizer, and how many steps are done."""

    def __init__(self, task: QatTask) -> None:
        self.task = task
        self.student = copy.deepcopy(task.teacher)
        self.layers = put_on_grid(self.student, task.weights)
        for model in (task.teacher, self.student):
            _hold_as_products(model, products_dtype(task.ids_NT.device))
        self.parameters = {name: p for name, p in self.student.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(self.parameters.values(), weight_decay=0.0, fused=True)
        self.step = 0

    def advance(self) -> float:
        """One step over `batch_size` windows, one window in memory at a time; returns its loss."""
        training = self.task.training
        peak = training.learning_rate or LEARNING_RATE
        rate = learning_rate(self.step, steps=training.steps, peak=peak, warmup_fraction=WARMUP)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        windows = step_windows(len(self.task.ids_NT), self.step, size=training.batch_size, seed=self.task.seed)
        with fastest_products(self.task.ids_NT.device), rounded_once(self.layers.values()):
            loss = sum(self._backward(self.task.ids_NT[window : window + 1], len(windows)) for window in windows)
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), MAX_GRADIENT_NORM)
        if not torch.isfinite(norm):
            raise InvalidRecipe(
                f"the gradient became {float(norm)} at step {self.step + 1}: lower learning_rate", field="learning_rate"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss

    @torch.no_grad()
    def look(self) -> float:
        """The mean divergence on LOOK_WINDOWS windows."""
        windows = torch.split(self.task.ids_NT[:LOOK_WINDOWS], 1)
        with fastest_products(self.task.ids_NT.device):
            return sum(float(self._divergence(ids_BT)) for ids_BT in windows) / len(windows)

    def checkpoint(self) -> Checkpoint:
        tensors = grouped(weights=trained_state(self.student)) | optimizer_tensors(self.optimizer, self.parameters)
        return Checkpoint(tensors, {"identity": self.task.identity, "step": self.step})

    def restore(self, checkpoint: Checkpoint) -> None:
        load_trained_state(self.student, checkpoint.group("weights"))
        load_optimizer(self.optimizer, self.parameters, checkpoint)
        self.step = int(checkpoint.facts["step"])

    def _backward(self, ids_BT: Tensor, windows: int) -> float:
        with torch.enable_grad():
            loss = self._divergence(ids_BT) / windows
            torch.autograd.backward(loss)
        return float(loss.detach())

    def _divergence(self, ids_BT: Tensor) -> Tensor:
        with torch.no_grad():
            wanted_BTV = self.task.teacher(input_ids=ids_BT, use_cache=False).logits
        found_BTV = self.student(input_ids=ids_BT, use_cache=False).logits
        return mean_divergence(wanted_BTV.flatten(0, 1), found_BTV.flatten(0, 1))


def _hold_as_products(model: nn.Module, dtype: torch.dtype) -> None:
    """Hold the weights of linear layers that are not trained as their products read them, cast once for all passes."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(layer.weight.detach().to(dtype), requires_grad=False)


def step_windows(count: int, step: int, *, size: int, seed: int) -> list[int]:
    """Windows of step 0, 1, ...: a pass over all of them in an order of its own after the other, drawn from `seed`."""
    found = []
    for place in range(step * size, (step + 1) * size):
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + place // count))
        found.append(int(order[place % count]))
    return found
