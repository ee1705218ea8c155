"""SignRound on one decoder layer: learn the roundings of all its weights together, on the layer's own output.

A step runs the layer, its weights on the grid as they ship, over a few calibration windows. Its loss is the squared
error of the output as a share of the squared size of the wanted one, over all tokens together: the few tokens that
decoders make a thousand times larger than the others are what their attention rests on. Wanted is what the unquantized
model puts out there, so a layer also makes up for what the layers before it lost. Steps, and the comparison of
plain with learned roundings that decides which are kept, compute their products in the device's fastest type.

Shapes: B windows, T tokens, H hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compressors.layer_algorithms import LayerInputs, LayerOutcome, LayerWork
from compressors.layer_channels import calibration_inputs
from compressors.signround import Learned, Rounded, RoundingProblem, rounding_problem
from modelpress.quantization_recipes import QuantizeWeights, WeightTraining

LOOK_WINDOWS = 16
"""Calibration windows, evenly spaced, on which the learned roundings are compared with the plain ones."""


def quantize_layer(layer: LayerWork, arguments: QuantizeWeights) -> LayerOutcome:
    """Every linear layer of `layer`, whose weights it replaces; its loss is never above that of rounding to nearest,
    which is kept where the learned one's is not a number.

    Details: the losses of rounding and of what is kept.
    """
    lesson = Lesson.of(layer)
    rounded, plain = lesson.put(), lesson.loss()
    learn(lesson, arguments.training)
    learned, loss = lesson.put(), lesson.loss()
    kept, loss = (learned, loss) if loss <= plain else (rounded, plain)
    weights = {name: weight.weight for name, weight in kept.items()}
    return LayerOutcome(weights, details={"loss of rounding": plain, "loss": loss})


def learn(lesson: Lesson, training: WeightTraining) -> None:
    """Signed gradient descent at a rate that falls in a straight line to 0."""
    peak = training.learning_rate or 1 / training.steps
    order = _batches(len(lesson.inputs), size=training.batch_size, seed=lesson.layer.seed)
    for step in range(training.steps):
        rounded = lesson.put()
        gradients = lesson.gradients(next(order))
        rate = peak * (1 - step / training.steps)
        for name, problem in lesson.problems.items():
            lesson.learned[name].descend(problem.gradients(gradients[name], rounded[name]), rate=rate)


@dataclass(frozen=True, eq=False)
class Lesson:
    """A layer, what it reads, what it is to make of that, and the roundings of its weights learned so far."""

    layer: LayerWork
    inputs: LayerInputs
    wanted: LayerInputs
    problems: Mapping[str, RoundingProblem]
    learned: Mapping[str, Learned]

    @staticmethod
    def of(layer: LayerWork) -> Lesson:
        if layer.wanted is None:
            raise ValueError(f"{layer.name} has no wanted outputs: this algorithm needs them")
        weights = {name: linear.weight.detach().clone() for name, linear in layer.linears.items()}
        problems = {name: rounding_problem(weight_OI, layer.grid) for name, weight_OI in weights.items()}
        learned = {name: problem.start() for name, problem in problems.items()}
        return Lesson(layer, calibration_inputs(layer), layer.wanted, problems, learned)

    def put(self) -> dict[str, Rounded]:
        """Give the layer its weights as they are rounded now."""
        rounded = {name: problem.rounded(self.learned[name]) for name, problem in self.problems.items()}
        for name, weight in rounded.items():
            self.layer.linears[name].weight.data.copy_(weight.weight.dequantized())
        return rounded

    def gradients(self, windows: Tensor) -> dict[str, Tensor]:
        """Of the loss on these windows by each weight [O, I]."""
        parameters = {name: self.layer.linears[name].weight.requires_grad_(True) for name in self.problems}
        with torch.enable_grad():
            found = torch.autograd.grad(self._loss(windows), list(parameters.values()))
        for parameter in parameters.values():
            parameter.requires_grad_(False)
        return dict(zip(parameters, found, strict=True))

    @torch.no_grad()
    def loss(self) -> float:
        """Of LOOK_WINDOWS windows at most."""
        every = -(-len(self.inputs) // LOOK_WINDOWS)
        shown = range(0, len(self.inputs), every)
        return sum(float(self._loss(torch.tensor([window]))) for window in shown) / len(shown)

    def _loss(self, windows: Tensor) -> Tensor:
        return squared_error(self.layer.run(self.inputs.windows(windows)), self.wanted.windows(windows))


def squared_error(found_BTH: Tensor, wanted_BTH: Tensor) -> Tensor:
    """|found - wanted|^2 / |wanted|^2; of a wanted output of zeros the numerator over the smallest number."""
    size = wanted_BTH.square().sum().clamp(min=torch.finfo(wanted_BTH.dtype).tiny)
    return (found_BTH - wanted_BTH).square().sum() / size


def _batches(count: int, *, size: int, seed: int) -> Iterator[Tensor]:
    """Indices of windows without end, each pass over all of them in an order of its own; a pass drops its rest."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(count, generator=generator)
        yield from (order[first : first + size] for first in range(0, max(1, count - size + 1), size))
