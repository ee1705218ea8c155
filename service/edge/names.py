"""Resource names as they travel: `uploads/<id>`, `artifacts/sha256:<hex>`, `conversions/<id>`."""

from __future__ import annotations

from modelpress.digests import Digest
from modelpress.errors import InvalidRequest

ARTIFACT = "artifacts/"


def resource_id(name: str, collection: str) -> str:
    """The part after `<collection>/`; InvalidRequest names what was expected."""
    prefix, slash, identifier = name.partition("/")
    if prefix != collection or not slash or not identifier or len(identifier) > 80:
        raise InvalidRequest(f"name {name[:120]!r} is not {collection + '/<id>'!r}", field="name")
    return identifier


def artifact_digest(name: str, *, field: str) -> Digest:
    """The digest in `artifacts/sha256:<hex>`; InvalidRequest naming `field` for anything else."""
    if not name:
        raise InvalidRequest(f"{field} is required: name an artifact as 'artifacts/sha256:<hex>'", field=field)
    try:
        return Digest(name.removeprefix(ARTIFACT) if name.startswith(ARTIFACT) else "")
    except InvalidRequest:
        raise InvalidRequest(
            f"{field} is {name[:100]!r}: name an artifact as 'artifacts/sha256:' and 64 lower-case hex digits",
            field=field,
        ) from None
