"""Resource names as they travel: `uploads/<id>`, `artifacts/sha256:<hex>`, `conversions/<id>`."""

from __future__ import annotations

from modelpress.digests import Digest
from modelpress.errors import InvalidRequest


def resource_id(name: str, collection: str) -> str:
    """The part after `<collection>/`; InvalidRequest names what was expected."""
    prefix, slash, identifier = name.partition("/")
    if prefix != collection or not slash or not identifier or len(identifier) > 80:
        raise InvalidRequest(f"name {name[:120]!r} is not {collection + '/<id>'!r}", field="name")
    return identifier


def artifact_digest(name: str) -> Digest:
    return Digest(resource_id(name, "artifacts"))
