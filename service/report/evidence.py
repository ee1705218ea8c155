"""From step results to the report: every figure is copied from a record, none is made here.

`measured_by` of each part is the conversion whose step measured it; another conversion's id means a cache hit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from modelpress.digests import Digest, digest_bytes
from modelpress.language_reports import LanguageReport
from modelpress.merge_changes import read_changes
from modelpress.merge_recipes import NO_REFERENCE
from modelpress.merge_reports import MergeReport
from modelpress.reports import (
    DriftReport,
    EvaluationReport,
    GateDecision,
    Input,
    LatencyRow,
    Measured,
    Report,
    StageRecord,
)
from service.desk import Desk
from service.publication import Sources
from service.requests import ConversionRequest
from service.steps import StepResult

WITHOUT_REFERENCE = {"reference": "", "layers": 0, "layer_difference": None, "logits_missing": NO_REFERENCE}


def assemble_merge(stage: StepResult, check: StepResult | None) -> MergeReport:
    """What `stage` changed and what `check` compared; without a check there was nothing to compare with."""
    compared = check.record if check else WITHOUT_REFERENCE
    changes = read_changes(stage.record["touched"], stage.record["details"]).as_report()
    measured_by = (check or stage).measured_by
    return MergeReport.model_validate({**compared, **changes, "measured_by": measured_by})


def assemble_evaluation(
    predictions: Mapping[str, StepResult], quality: StepResult, parity: StepResult, latency: StepResult
) -> EvaluationReport:
    """`predictions` by role (`baseline`, `candidate`); the three measurements' records are parts of the report."""
    parts = dict(quality.record)
    for role, result in predictions.items():
        parts[role] = {**parts[role], "measured_by": result.measured_by}
    return EvaluationReport.model_validate(
        {
            **parts,
            "parity": parity.record,
            "latency": [LatencyRow.model_validate(row) for row in latency.record["rows"]],
            "latency_measured_by": latency.measured_by,
        }
    )


@dataclass(frozen=True)
class LanguageSteps:
    """What was measured of a language model, each by a step of its own. `parity` is None where nothing was exported to
    another runtime.
    """

    language: StepResult
    choices: StepResult
    generations: StepResult
    parity: StepResult | None


def assemble_language(steps: LanguageSteps) -> LanguageReport:
    return LanguageReport.model_validate(
        {
            **steps.language.record,
            **steps.choices.record,
            **steps.generations.record,
            "parity": steps.parity.record if steps.parity else None,
            "measured_by": steps.language.measured_by,
        }
    )


def assemble_drift(drift: StepResult) -> DriftReport:
    return DriftReport.model_validate(drift.record)


def assemble_report(
    desk: Desk,
    model: Digest,
    stages: Sequence[StepResult],
    measured: Measured,
    decision: GateDecision,
) -> Report:
    conversion, request = desk.conversion, desk.conversion.request
    now = desk.now()
    return Report(
        conversion=f"conversions/{conversion.id}",
        created=datetime.fromtimestamp(now, timezone.utc).isoformat(timespec="seconds"),
        requested_by=conversion.requested_by,
        labels=dict(request.labels),
        inputs=tuple(_inputs(request, desk)),
        model_digest=str(model),
        recipe_digest=str(digest_bytes(request.recipe_yaml.encode())),
        policy_digest=str(digest_bytes(request.policy_yaml.encode())),
        seed=request.seed,
        stages=tuple(_stage(result) for result in stages),
        merge=measured.merge,
        evaluation=measured.evaluation,
        language=measured.language,
        drift=measured.drift,
        decision=decision,
        environment=desk.environment,
        reused_from=desk.reused_from,
        warnings=(*_data_warnings(request, measured), *_truncation_warnings(measured.evaluation)),
        seconds=now - conversion.started,
    )


def _stage(result: StepResult) -> StageRecord:
    record = {name: value for name, value in result.record.items() if name in StageRecord.model_fields}
    return StageRecord.model_validate({**record, "measured_by": result.measured_by})


def _inputs(request: ConversionRequest, desk: Desk) -> Iterator[Input]:
    roles: dict[str, Digest | None] = {"base": request.base}
    weights = {f"adapter {adapter.name}": adapter.weight for adapter in request.adapters}
    weights |= {f"model {model.name}": model.weight for model in request.models}
    roles |= {f"adapter {adapter.name}": adapter.artifact for adapter in request.adapters}
    roles |= {f"model {model.name}": model.artifact for model in request.models}
    roles |= {"train": request.train, "validation": request.validation}
    roles |= {"evaluation": request.evaluation_dataset, "probes": request.probes}
    for role, digest in roles.items():
        if digest:
            size = desk.store.manifest(digest).size_bytes
            yield Input(role=role, digest=str(digest), size_bytes=size, weight=weights.get(role))


def _data_warnings(request: ConversionRequest, measured: Measured) -> Iterator[str]:
    """What the datasets that were not given mean for the figures."""
    if measured.drift and request.probes is None:
        yield "no probes were given: drift was measured on the evaluation texts"
    if measured.evaluation and request.train and request.validation is None:
        yield "no validation dataset was given: a tenth of the training data was held out to choose by"


def _truncation_warnings(evaluation: EvaluationReport | None) -> Iterator[str]:
    for model in (evaluation.baseline, evaluation.candidate) if evaluation else ():
        if model.truncated:
            yield f"{model.truncated} evaluation texts were truncated at the maximum length"


def sources(request: ConversionRequest, model: Digest) -> Sources:
    """What the output folder holds besides the report."""
    return Sources(
        model=model,
        recipe_yaml=request.recipe_yaml,
        policy_yaml=request.policy_yaml,
        evaluation_yaml=request.evaluation_yaml,
    )
