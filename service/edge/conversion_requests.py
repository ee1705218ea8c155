"""The request for a conversion, read from the wire.

request = request_from_proto(message)              # InvalidRequest names the field, value and cure
"""

from __future__ import annotations

import re

from google.protobuf.duration_pb2 import Duration

from modelpress.digests import Digest
from modelpress.errors import InvalidRequest
from modelpress.requests import Limits
from modelpress.v1 import conversions_pb2 as pb
from service.edge.names import artifact_digest
from service.requests import AdapterRequest, ConversionRequest, ModelRequest

_REQUEST_ID = re.compile(r"[A-Za-z0-9-]{1,63}")


def request_from_proto(message: pb.CreateConversionRequest) -> ConversionRequest:
    """Read the wire's request; `request_id` is checked, and belongs to the call, not to the value."""
    check_request_id(message.request_id)
    inputs = message.inputs
    return ConversionRequest(
        base=artifact_digest(inputs.base, field="inputs.base"),
        adapters=tuple(_adapter(adapter, index) for index, adapter in enumerate(inputs.adapters)),
        models=tuple(_model(model, index) for index, model in enumerate(inputs.models)),
        train=_optional_digest(inputs.train, "inputs.train"),
        validation=_optional_digest(inputs.validation, "inputs.validation"),
        evaluation_dataset=_optional_digest(inputs.evaluation, "inputs.evaluation"),
        probes=_optional_digest(inputs.probes, "inputs.probes"),
        recipe_yaml=message.recipe.yaml,
        evaluation_yaml=message.evaluation.yaml,
        policy_yaml=message.policy.yaml,
        limits=_limits(message.limits),
        labels=dict(message.labels),
        seed=message.seed,
        priority=message.priority,
    )


def check_request_id(request_id: str) -> None:
    """Raise InvalidRequest unless it is empty or 1 to 63 of A-Z, a-z, 0-9, `-`."""
    if request_id and not _REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest(f"request_id {request_id[:80]!r} is not 1 to 63 of A-Z, a-z, 0-9, '-'", field="request_id")


def _optional_digest(name: str, field: str) -> Digest | None:
    return artifact_digest(name, field=field) if name else None


def _adapter(message: pb.AdapterInput, index: int) -> AdapterRequest:
    artifact = artifact_digest(message.artifact, field=f"inputs.adapters[{index}].artifact")
    return AdapterRequest(message.name, artifact, message.weight or 1.0)


def _model(message: pb.ModelInput, index: int) -> ModelRequest:
    artifact = artifact_digest(message.artifact, field=f"inputs.models[{index}].artifact")
    return ModelRequest(message.name, artifact, message.weight if message.HasField("weight") else 1.0)


def _limits(message: pb.Limits) -> Limits:
    return Limits(
        queue_timeout_s=_seconds(message.queue_timeout) if message.HasField("queue_timeout") else None,
        run_timeout_s=_seconds(message.run_timeout) if message.HasField("run_timeout") else None,
        memory_limit_bytes=message.memory_limit_bytes or None,
    )


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9
