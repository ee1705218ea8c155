"""gRPC errors as modelpress errors: one table by reason, one by status code.

The service sends every error with rich details (AIP-193): `ErrorInfo` carries the stable reason and metadata,
`BadRequest` the field at fault, `PreconditionFailure` the blobs that are missing. What comes from a proxy or from
gRPC itself has no details and is told apart by its status code alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from modelpress import errors

DETAILS_KEY = "grpc-status-details-bin"
MISSING_BLOB = "MISSING_BLOB"
TYPE_KEY = "type"
"""Metadata of ErrorInfo: the reason that names the error's type, where `reason` itself is a finer one."""

BY_REASON: Mapping[str, type[errors.ModelpressError]] = {
    "INVALID_REQUEST": errors.InvalidRequest,
    "INVALID_RECIPE": errors.InvalidRecipe,
    "INVALID_POLICY": errors.InvalidPolicy,
    "INVALID_DATASET": errors.InvalidDataset,
    "INVALID_MODEL": errors.InvalidModel,
    "DIGEST_MISMATCH": errors.DigestMismatch,
    "NOT_FOUND": errors.NotFound,
    "ALREADY_EXISTS": errors.AlreadyExists,
    "FAILED_PRECONDITION": errors.FailedPrecondition,
    "MISSING_BLOBS": errors.MissingBlobs,
    "CONFLICT": errors.Conflict,
    "OVER_LIMIT": errors.OverLimit,
    "UNAUTHENTICATED": errors.Unauthenticated,
    "PERMISSION_DENIED": errors.PermissionDenied,
    "CANCELLED": errors.Cancelled,
    "UNAVAILABLE": errors.Unavailable,
    "DATA_LOSS": errors.DataLoss,
    "VERIFICATION_FAILED": errors.VerificationFailed,
    "INTERNAL": errors.InternalError,
}

BY_STATUS: Mapping[grpc.StatusCode, type[errors.ModelpressError]] = {
    grpc.StatusCode.OK: errors.InternalError,
    grpc.StatusCode.CANCELLED: errors.Cancelled,
    grpc.StatusCode.UNKNOWN: errors.InternalError,
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.Unavailable,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.ALREADY_EXISTS: errors.AlreadyExists,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.OverLimit,
    grpc.StatusCode.FAILED_PRECONDITION: errors.FailedPrecondition,
    grpc.StatusCode.ABORTED: errors.Conflict,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidRequest,
    grpc.StatusCode.UNIMPLEMENTED: errors.FailedPrecondition,
    grpc.StatusCode.INTERNAL: errors.InternalError,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.DATA_LOSS: errors.DataLoss,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
}


@dataclass(frozen=True)
class Details:
    """What the rich details of one error say."""

    reason: str
    field: str
    metadata: Mapping[str, str]
    missing_digests: tuple[str, ...]


_NO_DETAILS = Details("", "", {}, ())


def from_rpc_error(error: grpc.RpcError, *, address: str) -> errors.ModelpressError:
    """The modelpress error that `error` stands for. `address` is named only where no server answered."""
    code, message = error.code(), error.details() or "no message"
    details = _read_details(error)
    if details.missing_digests:
        missing = errors.MissingBlobs(details.missing_digests)
        missing.message, missing.args = message, (message,)
        return missing
    if not details.reason:
        return BY_STATUS[code](_sentence(code, message, address))
    kind = BY_REASON.get(details.metadata.get(TYPE_KEY, details.reason), BY_STATUS[code])
    if kind is errors.MissingBlobs:
        kind = errors.FailedPrecondition
    metadata = {key: value for key, value in details.metadata.items() if key != TYPE_KEY}
    return kind(message, reason=details.reason, field=details.field, metadata=metadata)


def _sentence(code: grpc.StatusCode, message: str, address: str) -> str:
    """gRPC's own texts name sockets and stack layers; people need what to check."""
    first_line = message.splitlines()[0][:300]
    cause = first_line.rpartition("last error: ")[2]
    sentences = {
        grpc.StatusCode.UNAVAILABLE: f"no server answers at {address}: start it, or name another ({cause})",
        grpc.StatusCode.DEADLINE_EXCEEDED: f"the server at {address} did not answer in time: try again later",
        grpc.StatusCode.UNIMPLEMENTED: f"the server at {address} does not know this call: is it modelpress, as new?",
    }
    return sentences.get(code, first_line)


def _read_details(error: grpc.RpcError) -> Details:
    status = _status(error)
    if status is None:
        return _NO_DETAILS
    info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    failure = error_details_pb2.PreconditionFailure()
    for detail in status.details:
        for message in (info, bad_request, failure):
            if detail.Is(message.DESCRIPTOR):
                detail.Unpack(message)
    return Details(
        reason=info.reason,
        field=bad_request.field_violations[0].field if bad_request.field_violations else "",
        metadata=dict(info.metadata),
        missing_digests=tuple(v.subject for v in failure.violations if v.type == MISSING_BLOB),
    )


def _status(error: grpc.RpcError) -> Any:
    """The google.rpc.Status of the trailing metadata, or None. (grpcio-status would pin protobuf for one line.)"""
    trailers: Any = error.trailing_metadata() or ()
    encoded = next((value for key, value in trailers if key == DETAILS_KEY), None)
    return status_pb2.Status.FromString(encoded) if encoded else None
