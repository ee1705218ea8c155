"""Every error that modelpress raises on purpose, by what the caller can do about it.

    ModelpressError
    ├── InvalidRequest            fix the request
    │   ├── InvalidRecipe         a recipe, stage or argument that cannot be
    │   ├── InvalidPolicy         a gate or bound that cannot be
    │   ├── InvalidDataset        a column, label or line of a dataset
    │   ├── InvalidModel          a model, adapter or tensor that cannot be used
    │   └── DigestMismatch        the bytes sent are not the bytes declared
    ├── NotFound                  upload it, or name another
    ├── AlreadyExists             the same name is taken by something else
    ├── FailedPrecondition        the state does not allow it now
    │   └── MissingBlobs          upload these blobs first
    ├── Conflict                  somebody else was faster: read again, retry
    ├── OverLimit                 a smaller request, or later
    ├── Unauthenticated           send a valid token
    ├── PermissionDenied          another identity is needed
    ├── Cancelled                 cancelled on request
    ├── Unavailable               the same call again, later
    ├── DataLoss                  stored bytes no longer have their digest
    ├── VerificationFailed        do not trust this folder
    └── InternalError             our fault

Each carries a `reason` (UPPER_SNAKE_CASE, stable, for programs), a message (for people: field, value, cure)
and, where one field is at fault, the `field`'s path. A message never holds a server path, a host or a secret.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class ModelpressError(Exception):
    """The root. `reason` is stable; `metadata` holds short facts for programs."""

    reason = "INTERNAL"

    def __init__(
        self, message: str, *, reason: str | None = None, field: str = "", metadata: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or type(self).reason
        self.field = field
        self.metadata = dict(metadata or {})


class InvalidRequest(ModelpressError):
    reason = "INVALID_REQUEST"


class InvalidRecipe(InvalidRequest):
    reason = "INVALID_RECIPE"


class InvalidPolicy(InvalidRequest):
    reason = "INVALID_POLICY"


class InvalidDataset(InvalidRequest):
    reason = "INVALID_DATASET"


class InvalidModel(InvalidRequest):
    reason = "INVALID_MODEL"


class DigestMismatch(InvalidRequest):
    reason = "DIGEST_MISMATCH"


class NotFound(ModelpressError):
    reason = "NOT_FOUND"


class AlreadyExists(ModelpressError):
    reason = "ALREADY_EXISTS"


class FailedPrecondition(ModelpressError):
    reason = "FAILED_PRECONDITION"


class MissingBlobs(FailedPrecondition):
    """Blobs that a manifest names and the server does not hold for this caller."""

    reason = "MISSING_BLOBS"

    def __init__(self, digests: Sequence[str]) -> None:
        shown = ", ".join(digests[:3]) + (f" and {len(digests) - 3} more" if len(digests) > 3 else "")
        super().__init__(f"{len(digests)} blobs of the manifest are missing: upload {shown} first")
        self.digests = tuple(digests)


class Conflict(ModelpressError):
    reason = "CONFLICT"


class OverLimit(ModelpressError):
    reason = "OVER_LIMIT"


class Unauthenticated(ModelpressError):
    reason = "UNAUTHENTICATED"


class PermissionDenied(ModelpressError):
    reason = "PERMISSION_DENIED"


class Cancelled(ModelpressError):
    reason = "CANCELLED"


class Unavailable(ModelpressError):
    reason = "UNAVAILABLE"


class DataLoss(ModelpressError):
    reason = "DATA_LOSS"


class VerificationFailed(ModelpressError):
    reason = "VERIFICATION_FAILED"


class InternalError(ModelpressError):
    reason = "INTERNAL"
