"""Messages of the wire to the client's values and back. Nothing here talks to a server."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from enum import Enum
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from modelpress.digests import Digest
from modelpress.errors import DataLoss, InternalError, InvalidRequest
from modelpress.manifests import ArtifactKind, FileEntry, Manifest
from modelpress.reports import Outcome, Verdict
from modelpress.requests import ConversionRequest, Limits
from modelpress.v1 import artifacts_pb2, capabilities_pb2, conversions_pb2, reports_pb2
from modelpress.views import (
    Artifact,
    Conversion,
    ConversionInputs,
    ConversionState,
    Estimate,
    Event,
    Failure,
    FailureKind,
    Gate,
    Progress,
    ReportSummary,
    ServerCapabilities,
    StateChanged,
    StepFinished,
    StepStarted,
    Warned,
)

EnumT = TypeVar("EnumT", bound=Enum)


def kind_to_wire(kind: ArtifactKind) -> artifacts_pb2.ArtifactKind.ValueType:
    return artifacts_pb2.ArtifactKind.Value(f"ARTIFACT_KIND_{kind.name}")


def state_to_wire(state: ConversionState) -> conversions_pb2.ConversionState.ValueType:
    return conversions_pb2.ConversionState.Value(f"CONVERSION_STATE_{state.name}")


def verdict_to_wire(verdict: Verdict) -> reports_pb2.Verdict.ValueType:
    return reports_pb2.Verdict.Value(f"VERDICT_{verdict.name}")


def manifest_to_wire(manifest: Manifest) -> artifacts_pb2.Manifest:
    return artifacts_pb2.Manifest(
        files=[
            artifacts_pb2.File(path=entry.path, size_bytes=entry.size_bytes, digest=str(entry.digest))
            for entry in manifest.files
        ]
    )


def artifact_from_wire(message: artifacts_pb2.Artifact, *, name: str) -> Artifact:
    """Raises DataLoss where the manifest cannot be, or is not the one that `name`, the one asked for, is made from."""
    try:
        manifest = Manifest(tuple(FileEntry(f.path, f.size_bytes, Digest(f.digest)) for f in message.manifest.files))
    except InvalidRequest as fault:
        raise DataLoss(f"the manifest of {name} cannot be used: {fault.message}") from None
    if message.name != f"artifacts/{manifest.digest}":
        raise DataLoss(
            f"the manifest of {message.name[:90]} has the digest {manifest.digest}: do not use this artifact"
        )
    kind = ArtifactKind[artifacts_pb2.ArtifactKind.Name(message.kind).removeprefix("ARTIFACT_KIND_")]
    return Artifact(name, kind, manifest, _time(message, "create_time"))


def request_to_wire(request: ConversionRequest) -> conversions_pb2.CreateConversionRequest:
    message = conversions_pb2.CreateConversionRequest(
        seed=request.seed, priority=request.priority, labels=request.labels
    )
    message.inputs.base = request.base
    message.inputs.evaluation = request.evaluation
    message.inputs.train = request.train
    message.inputs.validation = request.validation
    message.inputs.probes = request.probes
    for adapter in request.adapters:
        message.inputs.adapters.add(name=adapter.name, artifact=adapter.artifact, weight=adapter.weight)
    for model in request.models:
        message.inputs.models.add(name=model.name, artifact=model.artifact, weight=model.weight)
    message.recipe.yaml = request.documents.recipe
    message.policy.yaml = request.documents.policy
    message.evaluation.yaml = request.documents.evaluation
    message.limits.CopyFrom(_limits_to_wire(request.limits))
    return message


def _limits_to_wire(limits: Limits) -> conversions_pb2.Limits:
    message = conversions_pb2.Limits(memory_limit_bytes=limits.memory_limit_bytes or 0)
    if limits.queue_timeout_s is not None:
        message.queue_timeout.CopyFrom(_duration(limits.queue_timeout_s))
    if limits.run_timeout_s is not None:
        message.run_timeout.CopyFrom(_duration(limits.run_timeout_s))
    return message


def conversion_from_wire(message: conversions_pb2.Conversion) -> Conversion:
    return Conversion(
        name=message.name,
        state=_state(message.state),
        inputs=_inputs(message.inputs),
        seed=message.seed,
        priority=message.priority,
        labels=dict(message.labels),
        requested_by=message.requested_by,
        attempt=message.attempt,
        create_time=_time(message, "create_time"),
        start_time=_time(message, "start_time"),
        end_time=_time(message, "end_time"),
        progress=_progress(message.progress) if message.HasField("progress") else None,
        failure=_failure(message.failure) if message.HasField("failure") else None,
        verdict=_verdict(message.verdict),
        output=message.output,
        reused_from=message.reused_from,
        etag=message.etag,
        last_sequence=message.last_sequence,
    )


def _inputs(message: conversions_pb2.ConversionInputs) -> ConversionInputs:
    return ConversionInputs(
        base=message.base,
        adapters={adapter.name: adapter.artifact for adapter in message.adapters},
        models={model.name: model.artifact for model in message.models},
        train=message.train,
        validation=message.validation,
        evaluation=message.evaluation,
        probes=message.probes,
    )


def estimate_from_wire(message: conversions_pb2.Estimate) -> Estimate:
    return Estimate(
        storage_bytes=message.storage_bytes,
        memory_bytes=message.memory_bytes,
        candidate_bytes=message.candidate_bytes,
        parameters=message.parameters,
        steps=tuple(message.steps),
        cached_steps=tuple(message.cached_steps),
        warnings=tuple(message.warnings),
    )


def event_from_wire(message: conversions_pb2.WatchConversionResponse) -> Event:
    return Event(message.sequence, message.time.ToDatetime(tzinfo=timezone.utc), _event_body(message))


def _event_body(
    message: conversions_pb2.WatchConversionResponse,
) -> StateChanged | StepStarted | Progress | StepFinished | Warned | None:
    kind = message.WhichOneof("event")
    if kind == "state_changed":
        changed = message.state_changed
        failure = _failure(changed.failure) if changed.HasField("failure") else None
        return StateChanged(_state(changed.state), failure, _verdict(changed.verdict))
    if kind == "step_started":
        started = message.step_started
        return StepStarted(started.step, started.step_index, started.step_count)
    if kind == "progress":
        return _progress(message.progress)
    if kind == "step_finished":
        done = message.step_finished
        return StepFinished(done.step, done.seconds, done.cached, done.digest, dict(done.figures))
    return Warned(message.warning.message) if kind == "warning" else None


def report_from_wire(message: reports_pb2.Report) -> ReportSummary:
    verdict = _verdict(message.verdict)
    if verdict is None:
        raise InternalError(f"{message.name} has no verdict that this client knows: use a newer client")
    return ReportSummary(message.name, verdict, tuple(_gate(gate) for gate in message.gates))


def _gate(message: reports_pb2.Gate) -> Gate:
    outcome = _enum(Outcome, reports_pb2.GateOutcome.Name, message.outcome, "GATE_OUTCOME_")
    if outcome is None:
        raise InternalError(f"gate {message.name!r} has no outcome that this client knows: use a newer client")
    return Gate(
        name=message.name,
        outcome=outcome,
        figure=message.figure if message.HasField("figure") else None,
        comparison=message.comparison,
        bound=message.bound,
        unit=message.unit,
        interval_low=message.interval_low if message.HasField("interval_low") else None,
        interval_high=message.interval_high if message.HasField("interval_high") else None,
        confidence=message.confidence if message.HasField("confidence") else None,
        sentence=message.sentence,
        examples_needed=message.examples_needed if message.HasField("examples_needed") else None,
    )


def capabilities_from_wire(message: capabilities_pb2.GetCapabilitiesResponse) -> ServerCapabilities:
    return ServerCapabilities(
        version=message.version,
        methods=tuple(message.methods),
        families=tuple(message.families),
        formats=tuple(message.formats),
        tasks=tuple(message.tasks),
        runtimes=tuple(message.runtimes),
        devices=tuple(message.devices),
        max_chunk_bytes=message.max_chunk_bytes,
        max_blob_bytes=message.max_blob_bytes,
        worker_slots=message.worker_slots,
        worker_threads=message.worker_threads,
        default_run_timeout_s=_seconds(message.default_run_timeout),
        default_memory_limit_bytes=message.default_memory_limit_bytes,
        public_key_pem=message.public_key_pem,
        development_key=message.development_key,
    )


def _progress(message: conversions_pb2.Progress) -> Progress:
    return Progress(
        step=message.step,
        step_index=message.step_index,
        step_count=message.step_count,
        done=message.done,
        total=message.total,
        loss=message.loss if message.HasField("loss") else None,
        remaining_s=_seconds(message.remaining) if message.HasField("remaining") else None,
    )


def _failure(message: conversions_pb2.Failure) -> Failure:
    kind = _enum(FailureKind, conversions_pb2.FailureKind.Name, message.kind, "FAILURE_KIND_")
    return Failure(kind or FailureKind.UNKNOWN, message.reason, message.message, message.step, message.next_action)


def _state(value: conversions_pb2.ConversionState.ValueType) -> ConversionState:
    state = _enum(ConversionState, conversions_pb2.ConversionState.Name, value, "CONVERSION_STATE_")
    return state or ConversionState.UNKNOWN


def _verdict(value: reports_pb2.Verdict.ValueType) -> Verdict | None:
    return _enum(Verdict, reports_pb2.Verdict.Name, value, "VERDICT_")


def _enum(kind: type[EnumT], name_of: Callable[[Any], str], value: int, prefix: str) -> EnumT | None:
    """The member of `kind` with the wire's name; None for unspecified, and for a value of a newer server."""
    try:
        return kind[name_of(value).removeprefix(prefix)]
    except (KeyError, ValueError):
        return None


def _time(message: Message, field: str) -> datetime | None:
    if not message.HasField(field):
        return None
    stamp: Timestamp = getattr(message, field)
    return stamp.ToDatetime(tzinfo=timezone.utc)


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
