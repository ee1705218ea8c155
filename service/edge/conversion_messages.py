"""Conversions and their events as messages of the wire."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from modelpress.reports import Verdict
from modelpress.v1 import conversions_pb2 as pb
from modelpress.v1 import recipes_pb2, reports_pb2
from modelpress.views import Estimate
from service.state.conversions import Conversion
from service.state.events import Event
from service.state.states import State


def conversion_message(conversion: Conversion) -> pb.Conversion:
    """Everything that is known of it."""
    request = conversion.request
    return pb.Conversion(
        name=f"conversions/{conversion.id}",
        state=_state(conversion.state.value),
        inputs=_inputs(request),
        recipe=recipes_pb2.RecipeSource(yaml=request["recipe_yaml"]),
        evaluation=recipes_pb2.EvaluationSource(yaml=request["evaluation_yaml"]),
        policy=recipes_pb2.PolicySource(yaml=request["policy_yaml"]),
        limits=_limits(request["limits"]),
        labels=request["labels"],
        seed=request["seed"],
        requested_by=conversion.requested_by,
        create_time=_timestamp(conversion.created),
        start_time=_timestamp(conversion.started),
        end_time=_timestamp(conversion.ended),
        progress=_progress(conversion.progress) if conversion.progress else None,
        failure=_failure(conversion.failure) if conversion.failure else None,
        verdict=_verdict(conversion.verdict.value if conversion.verdict else None),
        output=f"artifacts/{conversion.output}" if conversion.output else "",
        attempt=conversion.attempt,
        etag=conversion.etag,
        last_sequence=conversion.last_sequence,
        reused_from=f"conversions/{conversion.reused_from}" if conversion.reused_from else "",
        priority=conversion.priority,
    )


def estimate_message(estimate: Estimate) -> pb.Conversion:
    """The answer to `validate_only`: a conversion that does not exist, with its estimate."""
    return pb.Conversion(
        estimate=pb.Estimate(
            storage_bytes=estimate.storage_bytes,
            memory_bytes=estimate.memory_bytes,
            candidate_bytes=estimate.candidate_bytes,
            parameters=estimate.parameters,
            steps=estimate.steps,
            cached_steps=estimate.cached_steps,
            warnings=estimate.warnings,
        )
    )


def event_message(event: Event) -> pb.WatchConversionResponse:
    message = pb.WatchConversionResponse(sequence=event.sequence, time=_timestamp(event.time))
    getattr(message, event.kind).CopyFrom(_EVENTS[event.kind](event.body))
    return message


def state_of(value: pb.ConversionState.ValueType) -> State:
    """The state of a filter; ValueError for one that no conversion can have."""
    return State(pb.ConversionState.Name(value).removeprefix("CONVERSION_STATE_"))


def verdict_of(value: reports_pb2.Verdict.ValueType) -> Verdict:
    """The verdict of a filter; ValueError for one that no conversion can have."""
    return Verdict(reports_pb2.Verdict.Name(value).removeprefix("VERDICT_"))


def _inputs(request: Mapping[str, Any]) -> pb.ConversionInputs:
    adapters = [
        pb.AdapterInput(name=adapter["name"], artifact=_artifact(adapter["artifact"]), weight=adapter["weight"])
        for adapter in request["adapters"]
    ]
    models = [
        pb.ModelInput(name=model["name"], artifact=_artifact(model["artifact"]), weight=model["weight"])
        for model in request.get("models", ())
    ]
    return pb.ConversionInputs(
        base=_artifact(request["base"]),
        adapters=adapters,
        models=models,
        train=_artifact(request["train"]),
        validation=_artifact(request["validation"]),
        evaluation=_artifact(request["evaluation_dataset"]),
        probes=_artifact(request["probes"]),
    )


def _limits(limits: Mapping[str, Any]) -> pb.Limits:
    return pb.Limits(
        queue_timeout=_duration(limits["queue_timeout_s"]),
        run_timeout=_duration(limits["run_timeout_s"]),
        memory_limit_bytes=limits["memory_limit_bytes"] or 0,
    )


def _progress(body: Mapping[str, Any]) -> pb.Progress:
    return pb.Progress(
        step=body["step"],
        step_index=body["step_index"],
        step_count=body["step_count"],
        done=body.get("done", 0),
        total=body.get("total", 0),
        loss=body.get("loss"),
        remaining=_duration(body.get("remaining_s")),
    )


def _failure(body: Mapping[str, Any]) -> pb.Failure:
    return pb.Failure(
        kind=pb.FailureKind.Value(f"FAILURE_KIND_{body['kind']}"),
        reason=body["reason"],
        message=body["message"],
        step=body["step"],
        next_action=body["next_action"],
    )


def _state_changed(body: Mapping[str, Any]) -> pb.StateChanged:
    failure = _failure(body["failure"]) if "failure" in body else None
    return pb.StateChanged(state=_state(body["state"]), failure=failure, verdict=_verdict(body.get("verdict")))


def _step_started(body: Mapping[str, Any]) -> pb.StepStarted:
    return pb.StepStarted(step=body["step"], step_index=body["step_index"], step_count=body["step_count"])


def _step_finished(body: Mapping[str, Any]) -> pb.StepFinished:
    return pb.StepFinished(
        step=body["step"],
        seconds=body["seconds"],
        cached=body["cached"],
        digest=body["digest"],
        figures=body["figures"],
    )


def _warning(body: Mapping[str, Any]) -> pb.Warning:
    return pb.Warning(message=body["message"])


_EVENTS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "state_changed": _state_changed,
    "step_started": _step_started,
    "progress": _progress,
    "step_finished": _step_finished,
    "warning": _warning,
}


def _state(name: str) -> pb.ConversionState.ValueType:
    return pb.ConversionState.Value(f"CONVERSION_STATE_{name}")


def _verdict(name: str | None) -> reports_pb2.Verdict.ValueType:
    return reports_pb2.Verdict.Value(f"VERDICT_{name or 'UNSPECIFIED'}")


def _artifact(digest: str | None) -> str:
    return f"artifacts/{digest}" if digest else ""


def _timestamp(seconds: float | None) -> Timestamp | None:
    return None if seconds is None else Timestamp(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))


def _duration(seconds: float | None) -> Duration | None:
    return None if seconds is None else Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))
