"""The main path: ingest -> compress -> export -> evaluate -> drift -> gate -> sign -> publish.

Each arrow is one immutable value, each step one function. This module is torch-free and runs in the service process:
a compute step sends digests to the conversion's worker process and receives a digest. The verdict is computed here,
from what was measured; a worker's word on it does not exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from modelpress.digests import Digest
from modelpress.errors import InternalError
from modelpress.gates import decide
from modelpress.recipes import MergeLora
from modelpress.reports import DriftReport, EvaluationReport
from service.desk import Desk
from service.plan import Plan, PlannedStage, make_plan
from service.publication import Publication, publish
from service.report.evidence import assemble_drift, assemble_evaluation, assemble_report, sources
from service.requests import AdapterRequest
from service.steps import Step, StepResult

BASELINE_EXPORT = "export/baseline"


class Runner(Protocol):
    """What runs steps: the desk of an attempt, or the preflight's look into the cache."""

    def run(self, step: Step) -> StepResult: ...

    def run_paired(self, step: Step) -> StepResult:
        """As `run`, but measured anew unless every step so far came from the cache."""


@dataclass(frozen=True)
class Compressed:
    """The baseline and the compressed model as folders of safetensors, with what each stage recorded."""

    baseline: Digest
    model: Digest
    stages: tuple[StepResult, ...]


@dataclass(frozen=True)
class Exported:
    """Both models in the target format."""

    baseline: Digest
    candidate: Digest
    parity: Digest
    """The compressed model's own logits on the parity inputs."""
    stage: StepResult


def run(desk: Desk) -> Publication:
    """Take one conversion to its verdict. Every step's result is durable before the next one starts."""
    plan = make_plan(desk.conversion.request)
    compressed = compress(plan, desk)
    exported = export(plan, compressed, desk)
    evaluation = evaluate(plan, exported, desk)
    drift = measure_drift(plan, exported, desk)
    decision = decide(plan.request.policy, evaluation, drift)
    stages = (*compressed.stages, exported.stage)
    report = assemble_report(desk, exported.candidate, stages, (evaluation, drift), decision)
    return publish(report, sources(plan.request, exported.candidate), desk)


def compress(plan: Plan, runner: Runner) -> Compressed:
    """Merge losslessly into the baseline, then run every lossy stage on what the former one left."""
    merged = [_compress(plan, plan.merge, {"model": plan.request.base}, runner)] if plan.merge else []
    baseline = _written(merged[0]) if merged else plan.request.base
    results, model = list(merged), baseline
    for planned in plan.lossy:
        results.append(_compress(plan, planned, {"model": model, "teacher": baseline}, runner))
        model = _written(results[-1])
    return Compressed(baseline, model, tuple(results))


def export(plan: Plan, compressed: Compressed, runner: Runner) -> Exported:
    """Write baseline and compressed model in the target format, by the same code."""
    baseline = _compress(plan, PlannedStage(BASELINE_EXPORT, plan.export), {"model": compressed.baseline}, runner)
    planned = PlannedStage("export/candidate", plan.export)
    candidate = _compress(plan, planned, {"model": compressed.model}, runner)
    evidence = Digest(candidate.record["evidence"])
    return Exported(_written(baseline), _written(candidate), evidence, candidate)


def evaluate(plan: Plan, exported: Exported, runner: Runner) -> EvaluationReport:
    """Measure the exported files in their runtime: quality, footprint, parity and paired latency."""
    models = {"baseline": exported.baseline, "candidate": exported.candidate}
    predictions = {role: _predict(plan, f"predict/{role}", models[role], runner) for role in models}
    digests = {f"{role}_predictions": _written(result) for role, result in predictions.items()}
    arguments = plan.request.evaluation.model_dump(mode="json", include={"task", "confidence"})
    arguments["dataset"] = str(plan.request.evaluation_dataset)
    quality = runner.run(_step(plan, "evaluate/quality", "quality", arguments, {**models, **digests}))
    inputs = {"candidate": exported.candidate, "parity": exported.parity}
    parity = runner.run(_step(plan, "evaluate/parity", "parity", {}, inputs))
    shapes = plan.request.evaluation.latency.model_dump(mode="json")
    latency = runner.run_paired(_step(plan, "evaluate/latency", "latency", shapes, models))
    return assemble_evaluation(predictions, quality, parity, latency)


def measure_drift(plan: Plan, exported: Exported, runner: Runner) -> DriftReport:
    """Compare both models' answers on the probes; without probes, on the evaluation rows."""
    kind = "probe" if plan.has_probes else "predict"
    models = {"baseline": exported.baseline, "candidate": exported.candidate}
    inputs = {role: _written(_predict(plan, f"{kind}/{role}", model, runner)) for role, model in models.items()}
    probes = plan.request.probes or plan.request.evaluation_dataset
    arguments = {"confidence": plan.request.evaluation.confidence, "probes": str(probes)}
    return assemble_drift(runner.run(_step(plan, "drift", "drift", arguments, inputs)))


def _compress(plan: Plan, planned: PlannedStage, models: Mapping[str, Digest], runner: Runner) -> StepResult:
    """One recipe stage, with only the inputs that it reads: what it does not read cannot spoil its cache key."""
    arguments: dict[str, Any] = {"stage": planned.stage.model_dump(mode="json")}
    inputs = dict(models)
    if isinstance(planned.stage, MergeLora):
        adapters = _selected(plan, planned.stage)
        arguments["weights"] = {adapter.name: adapter.weight for adapter in adapters}
        inputs |= {f"adapter:{adapter.name}": adapter.artifact for adapter in adapters}
    elif planned.name != BASELINE_EXPORT:
        evaluation = plan.request.evaluation
        arguments["columns"] = evaluation.model_dump(
            mode="json", include={"text_column", "label_column", "label_names"}
        )
        datasets = {"train": plan.request.train, "validation": plan.request.validation}
        inputs |= {role: digest for role, digest in datasets.items() if digest}
    return runner.run(_step(plan, planned.name, f"compress/{planned.stage.method}", arguments, inputs))


def _selected(plan: Plan, stage: MergeLora) -> tuple[AdapterRequest, ...]:
    """The adapters that the stage names, in its order; all of the request's where it names none."""
    by_name = {adapter.name: adapter for adapter in plan.request.adapters}
    return tuple(by_name[name] for name in stage.adapters or by_name)


def _predict(plan: Plan, name: str, model: Digest, runner: Runner) -> StepResult:
    """Logits of every row. `predict/` reads and checks the labels, `probe/` only the texts."""
    evaluation = plan.request.evaluation.model_dump(mode="json", exclude={"latency", "confidence"})
    labelled = name.startswith("predict/")
    dataset = plan.request.evaluation_dataset if labelled else plan.request.probes or plan.request.evaluation_dataset
    return runner.run(
        _step(plan, name, "predict" if labelled else "probe", evaluation, {"model": model, "data": dataset})
    )


def _step(plan: Plan, name: str, operation: str, arguments: Mapping[str, Any], inputs: Mapping[str, Digest]) -> Step:
    return Step(name=name, operation=operation, arguments=arguments, inputs=inputs, seed=plan.request.seed)


def _written(result: StepResult) -> Digest:
    if result.digest is None:
        raise InternalError("a step that must write a folder wrote none")
    return result.digest
