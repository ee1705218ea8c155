"""The plan: which steps a request asks for, in order. A pure function of the request; nothing is run here.

compress/1-merge_lora  evaluate/merge          the merge, and what it gave against base plus adapters
compress/2-prune  ...                          one per further stage before `export`
export/baseline  export/candidate              the unpruned FP32 model and the compressed one

of a classifier:

predict/baseline  predict/candidate            logits of every evaluation row, in the target runtime
probe/baseline  probe/candidate                the same for the probes, where the request names some
evaluate/quality  evaluate/parity  evaluate/latency  drift

of a language model, whose baseline is exported only where the format has a runtime of its own (ONNX):

compare/evaluation  compare/probes             both models on every token of the texts
evaluate/choices  evaluate/generations  evaluate/parity  evaluate/language  drift

A recipe that only merges ends after the first line. Merged checkpoints have no `evaluate/merge`: there is no
independent reference for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from modelpress.digests import Digest
from modelpress.errors import InternalError
from modelpress.evaluations import Evaluation, LanguageEvaluation
from modelpress.merge_recipes import MergeLora, MergeModels
from modelpress.recipes import Export, Stage
from service.requests import AdapterRequest, ConversionRequest, ModelRequest

NamedT = TypeVar("NamedT", AdapterRequest, ModelRequest)

MERGE_CHECK = "evaluate/merge"
BASELINE_EXPORT = "export/baseline"
CANDIDATE_EXPORT = "export/candidate"
CLASSIFIER_MEASUREMENTS = ("evaluate/quality", "evaluate/parity", "evaluate/latency", "drift")


@dataclass(frozen=True)
class PlannedStage:
    """A recipe's stage with the name of its step."""

    name: str
    stage: Stage


@dataclass(frozen=True)
class PlannedMerge:
    """The stage that merges. It names what it merges, in its order, also where the recipe means all."""

    name: str
    stage: MergeLora | MergeModels
    merged: tuple[AdapterRequest, ...] | tuple[ModelRequest, ...]

    @property
    def inputs(self) -> dict[str, Digest]:
        """`adapter:NAME` or `model:NAME` -> artifact."""
        kind = "adapter" if isinstance(self.stage, MergeLora) else "model"
        return {f"{kind}:{each.name}": each.artifact for each in self.merged}

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "stage": self.stage.model_dump(mode="json"),
            "weights": {each.name: each.weight for each in self.merged},
        }


@dataclass(frozen=True)
class Plan:
    request: ConversionRequest
    merge: PlannedMerge | None
    """What it gives is the baseline."""
    lossy: tuple[PlannedStage, ...]
    export: Export

    @property
    def is_merge_only(self) -> bool:
        return self.request.recipe.is_merge_only

    @property
    def checks_merge(self) -> bool:
        """Whether an independent reference of the merge exists."""
        return self.merge is not None and isinstance(self.merge.stage, MergeLora)

    @property
    def evaluation_dataset(self) -> Digest:
        """Of a plan that does more than merge."""
        if self.request.evaluation_dataset is None:
            raise InternalError("a plan without an evaluation dataset has nothing to evaluate on")
        return self.request.evaluation_dataset

    @property
    def is_language(self) -> bool:
        """Whether the model generates text; else it classifies it."""
        return isinstance(self.request.evaluation, LanguageEvaluation)

    @property
    def evaluation(self) -> Evaluation:
        """Of a plan for a classifier."""
        if not isinstance(self.request.evaluation, Evaluation):
            raise InternalError("a plan for a language model has no evaluation of a classifier")
        return self.request.evaluation

    @property
    def language_evaluation(self) -> LanguageEvaluation:
        """Of a plan for a language model."""
        if not isinstance(self.request.evaluation, LanguageEvaluation):
            raise InternalError("a plan for a classifier has no evaluation of a language model")
        return self.request.evaluation

    @property
    def exports_baseline(self) -> bool:
        """Whether the baseline is measured in the target format, not as the safetensors that it is."""
        return not self.is_language or self.export.format == "onnx"

    @property
    def calibration(self) -> dict[str, Digest]:
        """The training dataset by its role, of a language model's plan that quantizes; else nothing. Layers' errors are
        measured on it also where no code depends on it.
        """
        train = self.request.train
        return {"train": train} if train and self.request.recipe.quantize_weights else {}

    @property
    def learned_from(self) -> dict[str, Digest]:
        """The same, where codes depend on it: the candidate saw these texts."""
        quantizer = self.request.recipe.quantize_weights
        return self.calibration if quantizer and quantizer.needs_calibration else {}

    @property
    def has_probes(self) -> bool:
        return self.request.probes not in (None, self.request.evaluation_dataset)

    @property
    def step_names(self) -> tuple[str, ...]:
        """Every step in the order in which it runs."""
        merge = [self.merge.name] if self.merge else []
        check = [MERGE_CHECK] if self.checks_merge else []
        if self.is_merge_only:
            return (*merge, *check)
        compress = [planned.name for planned in self.lossy]
        exports = [*([BASELINE_EXPORT] if self.exports_baseline else []), CANDIDATE_EXPORT]
        measure = self._language_steps() if self.is_language else self._classifier_steps()
        return (*merge, *check, *compress, *exports, *measure)

    def _classifier_steps(self) -> tuple[str, ...]:
        probes = ["probe/baseline", "probe/candidate"] if self.has_probes else []
        return ("predict/baseline", "predict/candidate", *probes, *CLASSIFIER_MEASUREMENTS)

    def _language_steps(self) -> tuple[str, ...]:
        probes = ["compare/probes"] if self.has_probes else []
        parity = ["evaluate/parity"] if self.exports_baseline else []
        answers = ["evaluate/choices", "evaluate/generations"]
        return ("compare/evaluation", *probes, *answers, *parity, "evaluate/language", "drift")


def make_plan(request: ConversionRequest) -> Plan:
    """Order the request's stages. The recipe is valid already, so this cannot fail."""
    stages = [(f"compress/{number}-{stage.method}", stage) for number, stage in enumerate(request.recipe.stages, 1)]
    merges = [
        _planned_merge(name, stage, request) for name, stage in stages if isinstance(stage, MergeLora | MergeModels)
    ]
    lossy = tuple(
        PlannedStage(name, stage) for name, stage in stages if not isinstance(stage, MergeLora | MergeModels | Export)
    )
    export = next(stage for _, stage in stages if isinstance(stage, Export))
    return Plan(request, merges[0] if merges else None, lossy, export)


def _planned_merge(name: str, stage: MergeLora | MergeModels, request: ConversionRequest) -> PlannedMerge:
    if isinstance(stage, MergeLora):
        adapters = _chosen(stage.adapters, request.adapters)
        names = {"adapters": tuple(adapter.name for adapter in adapters)}
        return PlannedMerge(name, stage.model_copy(update=names), adapters)
    models = _chosen(stage.models, request.models)
    return PlannedMerge(name, stage.model_copy(update={"models": tuple(model.name for model in models)}), models)


def _chosen(names: Sequence[str], given: Sequence[NamedT]) -> tuple[NamedT, ...]:
    """Those named, in the order of the names; all of them where none is named."""
    by_name = {each.name: each for each in given}
    return tuple(by_name[name] for name in names or by_name)
