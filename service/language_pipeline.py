"""The path of a language model, from the merge to the gate: quantize -> export -> compare -> evaluate -> drift.

The baseline is the base, merged where the recipe merges, in its own safetensors; in ONNX where the candidate is ONNX.
Both are compared on every token of the evaluation texts, each in the runtime that its files are for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelpress.digests import Digest
from modelpress.errors import InternalError
from modelpress.language_reports import LanguageReport
from modelpress.merge_reports import MergeReport
from modelpress.reports import DriftReport, Measured
from service.plan import BASELINE_EXPORT, CANDIDATE_EXPORT, Plan
from service.report.evidence import LanguageSteps, assemble_drift, assemble_language
from service.runner import Candidate, Compressed, Runner, step_of, written
from service.steps import StepResult

EXPORTS: Mapping[str, str] = {
    "compressed-tensors": "compress/export_compressed_tensors",
    "gptq": "compress/export_gptq",
    "bitsandbytes": "compress/export_bitsandbytes",
    "onnx": "compress/export_decoder_onnx",
}
"""Export format -> operation that writes it."""
UNREAD: Mapping[str, set[str]] = {
    "compare_tokens": {"generations", "max_new_tokens", "confidence"},
    "choices": {"generations", "max_new_tokens", "stride"},
    "generate": {"window", "stride", "batch_size", "confidence"},
    "language": {"window", "stride", "batch_size", "generations", "max_new_tokens"},
}
"""Operation -> fields of the evaluation that cannot change its result, and so are not part of its cache key."""


@dataclass(frozen=True)
class ComparedFolders:
    """Both models as they are measured."""

    baseline: Digest
    candidate: StepResult

    @property
    def models(self) -> dict[str, Digest]:
        return {"baseline": self.baseline, "candidate": written(self.candidate)}


@dataclass(frozen=True)
class FigureFolders:
    """Figures of both models on every token of the evaluation texts and of the probes: the same without probes."""

    evaluation: Digest
    probes: Digest


def make_language_candidate(
    plan: Plan, merged: Compressed, merge_report: MergeReport | None, runner: Runner
) -> Candidate:
    """Every step after the merge."""
    quantized = quantize(plan, merged, runner)
    exported = export(plan, quantized, runner)
    compared = compare(plan, exported, runner)
    language = evaluate(plan, exported, compared, runner)
    drift = measure_drift(plan, compared, runner)
    stages = (*quantized.stages, exported.candidate)
    return Candidate(exported.models["candidate"], stages, Measured(merge_report, drift=drift, language=language))


def quantize(plan: Plan, merged: Compressed, runner: Runner) -> Compressed:
    """The stages between merge and export, with the training dataset where they are calibrated."""
    results, model = list(merged.stages), merged.baseline
    for planned in plan.lossy:
        arguments: dict[str, Any] = {"stage": planned.stage.model_dump(mode="json")}
        if plan.calibration:
            arguments["columns"] = plan.language_evaluation.model_dump(mode="json", include={"text_column"})
        inputs = {"model": model, **plan.calibration}
        step = step_of(plan, planned.name, f"compress/{planned.stage.method}", arguments, inputs)
        results.append(runner.run(step))
        model = written(results[-1])
    return Compressed(merged.baseline, model, tuple(results))


def export(plan: Plan, quantized: Compressed, runner: Runner) -> ComparedFolders:
    """The candidate in the target format, and the baseline, too, where that has a runtime of its own."""
    operation, arguments = EXPORTS[plan.export.format], {"stage": plan.export.model_dump(mode="json")}
    baseline = quantized.baseline
    if plan.exports_baseline:
        step = step_of(plan, BASELINE_EXPORT, operation, arguments, {"model": baseline})
        baseline = written(runner.run(step))
    step = step_of(plan, CANDIDATE_EXPORT, operation, arguments, {"model": quantized.model})
    return ComparedFolders(baseline, runner.run(step))


def compare(plan: Plan, exported: ComparedFolders, runner: Runner) -> FigureFolders:
    """Both models on every token, once for each dataset."""
    evaluation = written(_on_rows(plan, "compare/evaluation", "compare_tokens", exported, runner))
    if not plan.has_probes:
        return FigureFolders(evaluation, evaluation)
    return FigureFolders(evaluation, written(_on_rows(plan, "compare/probes", "compare_tokens", exported, runner)))


def evaluate(plan: Plan, exported: ComparedFolders, compared: FigureFolders, runner: Runner) -> LanguageReport:
    """Perplexity, distance, choices, generations, footprint, and what the runtime changed."""
    choices = _on_rows(plan, "evaluate/choices", "choices", exported, runner)
    generations = _on_rows(plan, "evaluate/generations", "generate", exported, runner)
    parity = _measure_parity(plan, exported, runner) if plan.exports_baseline else None
    arguments = plan.language_evaluation.model_dump(mode="json", exclude=UNREAD["language"])
    inputs = {**exported.models, "figures": compared.evaluation, "data": plan.evaluation_dataset, **plan.learned_from}
    language = runner.run(step_of(plan, "evaluate/language", "language", arguments, inputs))
    return assemble_language(LanguageSteps(language, choices, generations, parity))


def measure_drift(plan: Plan, compared: FigureFolders, runner: Runner) -> DriftReport:
    """How far the most likely tokens moved on the probes; without probes, on the evaluation texts."""
    probes = plan.request.probes or plan.evaluation_dataset
    arguments = {"confidence": plan.language_evaluation.confidence, "probes": str(probes)}
    return assemble_drift(runner.run(step_of(plan, "drift", "token_drift", arguments, {"figures": compared.probes})))


def _measure_parity(plan: Plan, exported: ComparedFolders, runner: Runner) -> StepResult:
    if "evidence" not in exported.candidate.record:
        raise InternalError("the export left no logits of the model that it wrote")
    inputs = {"candidate": written(exported.candidate), "parity": Digest(exported.candidate.record["evidence"])}
    return runner.run(step_of(plan, "evaluate/parity", "language_parity", {}, inputs))


def _on_rows(plan: Plan, name: str, operation: str, exported: ComparedFolders, runner: Runner) -> StepResult:
    """Both models on the probes, where the step is named so, else on the evaluation dataset."""
    arguments = plan.language_evaluation.model_dump(mode="json", exclude=UNREAD[operation])
    probes = plan.request.probes if name == "compare/probes" else None
    data = probes or plan.evaluation_dataset
    return runner.run(step_of(plan, name, operation, arguments, {**exported.models, "data": data}))
