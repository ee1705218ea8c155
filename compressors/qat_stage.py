"""How the codes of a stage are chosen: layer by layer, or, with `qat`, by training the whole model before the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from compressors.algorithm_table import LAYER_ALGORITHMS
from compressors.layer_algorithms import LayerAlgorithm, LayerOutcome, LayerWork
from compressors.qat import QatTask, train
from compressors.quantization_plan import QuantizationPlan
from compressors.rtn import chosen_rounding
from compressors.stages import Monitor, Progress
from compressors.weight_layouts import AnyWeight
from modelpress.errors import InternalError
from modelpress.quantization_recipes import QuantizeWeights

WHOLE_MODEL = "qat"


@dataclass(frozen=True, eq=False)
class CodeChoice:
    """`monitor` is the one that the layers' progress is told; figures are the training's, as a record has them."""

    algorithm: LayerAlgorithm
    monitor: Monitor
    before: Mapping[str, float] = field(default_factory=dict)
    after: Mapping[str, float] = field(default_factory=dict)


def choose_codes(plan: QuantizationPlan, ids_NT: Tensor | None, *, seed: int, monitor: Monitor) -> CodeChoice:
    """Trains where the algorithm is `qat`; `ids_NT` are the calibration windows, which it needs."""
    if plan.arguments.algorithm != WHOLE_MODEL:
        return CodeChoice(LAYER_ALGORITHMS[plan.arguments.algorithm], monitor)
    if ids_NT is None:
        raise InternalError("qat was given no calibration windows")
    task = QatTask(
        teacher=plan.decoder.whole(),
        weights=_rounded(plan),
        ids_NT=ids_NT.to(plan.decoder.device),
        training=plan.arguments.training,
        seed=seed,
    )
    result = train(task, monitor)
    return CodeChoice(
        _Trained(result.weights), _TrainingCheckpoint(monitor), {"token_kl": result.before}, {"token_kl": result.after}
    )


def _rounded(plan: QuantizationPlan) -> dict[str, AnyWeight]:
    """What training starts from."""
    rounding = chosen_rounding(plan.grid, plan.arguments)
    weights: dict[str, AnyWeight] = {}
    for number in range(len(plan.decoder)):
        prefix, layer = plan.decoder.family.layer(number), plan.decoder.load(number)
        for name in plan.linears(number):
            weights[f"{prefix}.{name}"] = rounding(layer.get_parameter(f"{name}.weight"))
    return weights


@dataclass(frozen=True, eq=False)
class _Trained:
    """A layer algorithm that has its codes already, by the linear layers' full names."""

    weights: Mapping[str, AnyWeight]

    def __call__(self, layer: LayerWork, arguments: QuantizeWeights) -> LayerOutcome:
        return LayerOutcome({name: self.weights[f"{layer.name}.{name}"] for name in layer.linears})


@dataclass(frozen=True)
class _TrainingCheckpoint:
    """The training's checkpoint stays the newest: writing the layers takes seconds, training hours."""

    monitor: Monitor

    def progress(self, progress: Progress) -> None:
        self.monitor.progress(progress)

    def save_checkpoint(self, step: int, write: Callable[[Path], None]) -> None:
        pass

    def checkpoint(self) -> Path | None:
        return None
