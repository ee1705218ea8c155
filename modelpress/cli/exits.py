"""Exit codes: 0 is success and, where there is a verdict, APPROVED. Nothing else exits 0."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from modelpress import errors
from modelpress.reports import Verdict
from modelpress.views import Conversion, ConversionState


class Exit(IntEnum):
    """Stable: scripts branch on them. docs/cli.md lists them, and a test compares."""

    OK = 0
    INTERNAL = 1
    INVALID_REQUEST = 2
    REJECTED = 10
    INCONCLUSIVE = 11
    CONVERSION_FAILED = 12
    CONVERSION_CANCELLED = 13
    NOT_FOUND = 20
    WRONG_STATE = 21
    OVER_LIMIT = 22
    NOT_ALLOWED = 23
    UNAVAILABLE = 24
    DATA_LOSS = 25
    VERIFICATION_FAILED = 30
    INTERRUPTED = 130


class Interrupted(errors.ModelpressError):
    """Somebody pressed Ctrl-C. The message says what goes on and how to come back."""

    reason = "INTERRUPTED"


FOR_ERROR: Mapping[type[errors.ModelpressError], Exit] = {
    errors.InvalidRequest: Exit.INVALID_REQUEST,
    errors.NotFound: Exit.NOT_FOUND,
    errors.AlreadyExists: Exit.WRONG_STATE,
    errors.FailedPrecondition: Exit.WRONG_STATE,
    errors.Conflict: Exit.WRONG_STATE,
    errors.OverLimit: Exit.OVER_LIMIT,
    errors.Unauthenticated: Exit.NOT_ALLOWED,
    errors.PermissionDenied: Exit.NOT_ALLOWED,
    errors.Cancelled: Exit.CONVERSION_CANCELLED,
    errors.Unavailable: Exit.UNAVAILABLE,
    errors.DataLoss: Exit.DATA_LOSS,
    errors.VerificationFailed: Exit.VERIFICATION_FAILED,
    errors.InternalError: Exit.INTERNAL,
    Interrupted: Exit.INTERRUPTED,
    errors.ModelpressError: Exit.INTERNAL,
}
"""By the nearest base class."""

FOR_VERDICT: Mapping[Verdict, Exit] = {
    Verdict.APPROVED: Exit.OK,
    Verdict.REJECTED: Exit.REJECTED,
    Verdict.INCONCLUSIVE: Exit.INCONCLUSIVE,
}


def of_error(error: errors.ModelpressError) -> Exit:
    return next(FOR_ERROR[kind] for kind in type(error).__mro__ if kind in FOR_ERROR)


def of_conversion(conversion: Conversion) -> Exit:
    """Of one that has ended. A verdict that this client does not know is never OK."""
    if conversion.state is ConversionState.FAILED:
        return Exit.CONVERSION_FAILED
    if conversion.state is ConversionState.CANCELLED:
        return Exit.CONVERSION_CANCELLED
    return FOR_VERDICT[conversion.verdict] if conversion.verdict else Exit.INTERNAL
