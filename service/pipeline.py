"""The main path: merge -> check -> compress -> export -> evaluate -> drift -> gate -> sign -> publish.

Each arrow is one immutable value, each step one function. From `compress` to `drift` the way of a classifier stands
here, that of a language model in `service.language_pipeline`. Both are torch-free and run in the service process: a
compute step sends digests to the conversion's worker process and receives a digest. The verdict is computed here, from
what was measured; a worker's word on it does not exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelpress.digests import Digest
from modelpress.gates import decide
from modelpress.merge_reports import MergeReport
from modelpress.reports import DriftReport, EvaluationReport, Measured
from service.desk import Desk
from service.language_pipeline import make_language_candidate
from service.plan import BASELINE_EXPORT, CANDIDATE_EXPORT, MERGE_CHECK, Plan, PlannedStage, make_plan
from service.publication import Publication, publish
from service.report.evidence import assemble_drift, assemble_evaluation, assemble_merge, assemble_report, sources
from service.runner import Candidate, Compressed, Runner, step_of, written
from service.steps import StepResult


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
    candidate = make_candidate(plan, desk)
    decision = decide(plan.request.policy, candidate.measured)
    report = assemble_report(desk, candidate.model, candidate.stages, candidate.measured, decision)
    return publish(report, sources(plan.request, candidate.model), desk)


def make_candidate(plan: Plan, runner: Runner) -> Candidate:
    """Every step of the plan. What is merged ships as it is, or is the baseline of what is compressed."""
    merged = merge(plan, runner)
    merge_report = check_merge(plan, merged, runner)
    if plan.is_merge_only:
        return Candidate(merged.model, merged.stages, Measured(merge_report))
    if plan.is_language:
        return make_language_candidate(plan, merged, merge_report, runner)
    compressed = compress(plan, merged, runner)
    exported = export(plan, compressed, runner)
    evaluation = evaluate(plan, exported, runner)
    drift = measure_drift(plan, exported, runner)
    stages = (*compressed.stages, exported.stage)
    return Candidate(exported.candidate, stages, Measured(merge_report, evaluation, drift))


def merge(plan: Plan, runner: Runner) -> Compressed:
    """The baseline: the base, and what the recipe merges into it."""
    base = plan.request.base
    if plan.merge is None:
        return Compressed(base, base, ())
    planned = plan.merge
    inputs = {"model": base, **planned.inputs}
    result = runner.run(step_of(plan, planned.name, f"compress/{planned.stage.method}", planned.arguments, inputs))
    return Compressed(written(result), written(result), (result,))


def check_merge(plan: Plan, merged: Compressed, runner: Runner) -> MergeReport | None:
    """Compare what is stored with base plus adapters. The memory limit decides what can be compared, so that the limit
    in force is part of what is asked.
    """
    if plan.merge is None:
        return None
    if not plan.checks_merge:
        return assemble_merge(merged.stages[0], None)
    arguments = {**plan.merge.arguments, "memory_limit_bytes": runner.memory_limit_bytes}
    inputs = {"base": plan.request.base, "merged": merged.model, **plan.merge.inputs}
    return assemble_merge(merged.stages[0], runner.run(step_of(plan, MERGE_CHECK, "merge_check", arguments, inputs)))


def compress(plan: Plan, merged: Compressed, runner: Runner) -> Compressed:
    """Run every lossy stage on what the former one left."""
    results, model = list(merged.stages), merged.baseline
    for planned in plan.lossy:
        results.append(_compress(plan, planned, {"model": model, "teacher": merged.baseline}, runner))
        model = written(results[-1])
    return Compressed(merged.baseline, model, tuple(results))


def export(plan: Plan, compressed: Compressed, runner: Runner) -> Exported:
    """Write baseline and compressed model in the target format, by the same code."""
    baseline = _compress(plan, PlannedStage(BASELINE_EXPORT, plan.export), {"model": compressed.baseline}, runner)
    planned = PlannedStage(CANDIDATE_EXPORT, plan.export)
    candidate = _compress(plan, planned, {"model": compressed.model}, runner)
    evidence = Digest(candidate.record["evidence"])
    return Exported(written(baseline), written(candidate), evidence, candidate)


def evaluate(plan: Plan, exported: Exported, runner: Runner) -> EvaluationReport:
    """Measure the exported files in their runtime: quality, footprint, parity and paired latency."""
    models = {"baseline": exported.baseline, "candidate": exported.candidate}
    predictions = {role: _predict(plan, f"predict/{role}", models[role], runner) for role in models}
    digests = {f"{role}_predictions": written(result) for role, result in predictions.items()}
    arguments = plan.evaluation.model_dump(mode="json", include={"task", "confidence"})
    arguments["dataset"] = str(plan.evaluation_dataset)
    quality = runner.run(step_of(plan, "evaluate/quality", "quality", arguments, {**models, **digests}))
    inputs = {"candidate": exported.candidate, "parity": exported.parity}
    parity = runner.run(step_of(plan, "evaluate/parity", "parity", {}, inputs))
    shapes = plan.evaluation.latency.model_dump(mode="json")
    latency = runner.run_paired(step_of(plan, "evaluate/latency", "latency", shapes, models))
    return assemble_evaluation(predictions, quality, parity, latency)


def measure_drift(plan: Plan, exported: Exported, runner: Runner) -> DriftReport:
    """Compare both models' answers on the probes; without probes, on the evaluation rows."""
    kind = "probe" if plan.has_probes else "predict"
    models = {"baseline": exported.baseline, "candidate": exported.candidate}
    inputs = {role: written(_predict(plan, f"{kind}/{role}", model, runner)) for role, model in models.items()}
    probes = plan.request.probes or plan.evaluation_dataset
    arguments = {"confidence": plan.evaluation.confidence, "probes": str(probes)}
    return assemble_drift(runner.run(step_of(plan, "drift", "drift", arguments, inputs)))


def _compress(plan: Plan, planned: PlannedStage, models: Mapping[str, Digest], runner: Runner) -> StepResult:
    """One recipe stage, with only the inputs that it reads: what it does not read cannot spoil its cache key."""
    arguments: dict[str, Any] = {"stage": planned.stage.model_dump(mode="json")}
    inputs = dict(models)
    if planned.name != BASELINE_EXPORT:
        evaluation = plan.evaluation
        arguments["columns"] = evaluation.model_dump(
            mode="json", include={"text_column", "label_column", "label_names"}
        )
        datasets = {"train": plan.request.train, "validation": plan.request.validation}
        inputs |= {role: digest for role, digest in datasets.items() if digest}
    return runner.run(step_of(plan, planned.name, f"compress/{planned.stage.method}", arguments, inputs))


def _predict(plan: Plan, name: str, model: Digest, runner: Runner) -> StepResult:
    """Logits of every row. `predict/` reads and checks the labels, `probe/` only the texts."""
    evaluation = plan.evaluation.model_dump(mode="json", exclude={"latency", "confidence"})
    labelled = name.startswith("predict/")
    dataset = plan.evaluation_dataset if labelled else plan.request.probes or plan.evaluation_dataset
    return runner.run(
        step_of(plan, name, "predict" if labelled else "probe", evaluation, {"model": model, "data": dataset})
    )
