"""From our errors to the wire: one table, one rich status.

Every status carries ErrorInfo (reason, domain `modelpress`, metadata); a field at fault comes as
BadRequest.field_violations, missing blobs as PreconditionFailure. Any other exception is INTERNAL with an opaque id
that the log has too: its text never leaves the server.
"""

from __future__ import annotations

import errno
import logging
import secrets
from collections.abc import Mapping

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from modelpress import errors
from modelpress.errors import MissingBlobs, ModelpressError
from service.edge.context import Context

DOMAIN = "modelpress"
DETAILS_KEY = "grpc-status-details-bin"
MAX_MESSAGE_CHARACTERS = 1000
MAX_VIOLATIONS = 20
"""Clients refuse trailers beyond 8 KiB."""

STATUS: Mapping[type[ModelpressError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidRecipe: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidPolicy: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidDataset: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidModel: grpc.StatusCode.INVALID_ARGUMENT,
    errors.DigestMismatch: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.FailedPrecondition: grpc.StatusCode.FAILED_PRECONDITION,
    errors.MissingBlobs: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Conflict: grpc.StatusCode.ABORTED,
    errors.OverLimit: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.DataLoss: grpc.StatusCode.DATA_LOSS,
    errors.VerificationFailed: grpc.StatusCode.FAILED_PRECONDITION,
    errors.InternalError: grpc.StatusCode.INTERNAL,
    errors.ModelpressError: grpc.StatusCode.INTERNAL,
}

_log = logging.getLogger(__name__)


def code_of(error: ModelpressError) -> grpc.StatusCode:
    """The row of its type, or of the nearest parent's."""
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


def to_modelpress_error(error: Exception, method: str) -> ModelpressError:
    """Ours as they are, faults of ours with their full text in the log only."""
    if isinstance(error, ModelpressError) and code_of(error) is not grpc.StatusCode.INTERNAL:
        return error
    if _disk_is_full(error):
        return errors.OverLimit(
            "the server's storage is full: ask its operator to free space, then try again", reason="STORAGE_FULL"
        )
    identifier = secrets.token_hex(8)
    _log.error("call failed", exc_info=error, extra={"fields": {"method": method, "error_id": identifier}})
    return errors.InternalError(
        f"the server failed; its log has the cause under {identifier}: report that id to its operator",
        metadata={"error_id": identifier},
    )


def to_status(error: ModelpressError) -> status_pb2.Status:
    metadata = error.metadata | _type_metadata(error)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    details: list[Message] = [info]
    if isinstance(error, MissingBlobs):
        details.append(_missing_blobs(error))
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=_short(error.message))
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    packed = [any_pb2.Any() for _ in details]
    for target, detail in zip(packed, details, strict=True):
        target.Pack(detail)
    return status_pb2.Status(code=code_of(error).value[0], message=_short(error.message), details=packed)


def _type_metadata(error: ModelpressError) -> dict[str, str]:
    """`type` where neither the reason nor the status code tells the client which of our types this is."""
    first_of_code = next(kind for kind, code in STATUS.items() if code is code_of(error))
    told = error.reason == type(error).reason or type(error) is first_of_code
    return {} if told else {"type": type(error).reason}


async def abort(context: Context, error: ModelpressError) -> None:
    """End the call with the error's status; raises, as `context.abort` does."""
    status = to_status(error)
    trailer = ((DETAILS_KEY, status.SerializeToString()),)
    await context.abort(code_of(error), status.message, trailer)


def _missing_blobs(error: MissingBlobs) -> error_details_pb2.PreconditionFailure:
    violation = error_details_pb2.PreconditionFailure.Violation
    shown = error.digests[:MAX_VIOLATIONS]
    return error_details_pb2.PreconditionFailure(
        violations=[violation(type="MISSING_BLOB", subject=digest) for digest in shown]
    )


def _short(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_CHARACTERS else text[: MAX_MESSAGE_CHARACTERS - 1] + "…"


def _disk_is_full(error: Exception) -> bool:
    """As the operating system or the database says it."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "database or disk is full" in str(error)
