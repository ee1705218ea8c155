"""What tenants hold: blobs, and artifacts made of them. Every question carries the tenant; nothing crosses it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, RowMapping, Table, and_, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from modelpress.digests import Digest
from modelpress.errors import AlreadyExists, NotFound
from modelpress.manifests import ArtifactKind, Manifest
from service.faults import fault_point
from service.state.engine import reading
from service.state.tables import artifacts, blobs

BATCH = 500
"""Rows of one statement: SQLite allows 32,766 parameters."""
_INSERT: Mapping[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


@dataclass(frozen=True)
class Artifact:
    """A named manifest. `facts` is what intake read from its files; `created` is UTC seconds."""

    kind: ArtifactKind
    manifest: Manifest
    facts: Mapping[str, Any]
    created: float


@dataclass(frozen=True)
class Summary:
    """An artifact in a listing."""

    digest: Digest
    kind: ArtifactKind
    size_bytes: int
    file_count: int
    created: float


class ArtifactRepository:
    """All methods block: call them off the event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def held(self, tenant: str, digests: Sequence[Digest]) -> dict[Digest, int]:
        """Sizes of those blobs that the tenant holds."""
        with reading(self._engine) as connection:
            return held(connection, tenant, digests)

    def create(self, tenant: str, artifact: Artifact) -> Artifact:
        """Name a manifest whose blobs the tenant holds.

        Idempotent: the artifact that is there already is returned; AlreadyExists where it has another kind.
        """
        fault_point("artifact.create.before")
        with self._engine.begin() as connection:
            record_artifact(connection, tenant, artifact)
        fault_point("artifact.create.after")
        present = self.get(tenant, artifact.manifest.digest)
        if present.kind != artifact.kind:
            raise AlreadyExists(
                f"the same files are an artifact of kind {present.kind.name} already: name it so", field="kind"
            )
        return present

    def get(self, tenant: str, digest: Digest) -> Artifact:
        query = select(artifacts).where(artifacts.c.tenant == tenant, artifacts.c.digest == str(digest))
        with reading(self._engine) as connection:
            row = connection.execute(query).mappings().one_or_none()
        if row is None:
            raise NotFound(
                f"no artifact 'artifacts/{digest}': upload its files and create it first", reason="ARTIFACT_NOT_FOUND"
            )
        manifest = Manifest.from_json(row["manifest"])
        return Artifact(ArtifactKind(row["kind"]), manifest, row["facts"], row["created"])

    def replace_facts(self, tenant: str, digest: Digest, facts: Mapping[str, Any]) -> None:
        """What a newer release reads from the same files."""
        query = update(artifacts).where(artifacts.c.tenant == tenant, artifacts.c.digest == str(digest))
        with self._engine.begin() as connection:
            connection.execute(query.values(facts=dict(facts)))

    def page(
        self, tenant: str, *, kind: ArtifactKind | None, after: tuple[float, str] | None, limit: int
    ) -> list[Summary]:
        """At most `limit` artifacts, newest first, beginning after (created, digest) of the former page's last one."""
        conditions = [artifacts.c.tenant == tenant]
        if kind is not None:
            conditions.append(artifacts.c.kind == kind.value)
        if after is not None:
            created, digest = after
            later = and_(artifacts.c.created == created, artifacts.c.digest < digest)
            conditions.append(or_(artifacts.c.created < created, later))
        order = (artifacts.c.created.desc(), artifacts.c.digest.desc())
        with reading(self._engine) as connection:
            rows = connection.execute(select(artifacts).where(*conditions).order_by(*order).limit(limit)).mappings()
            return [_summary(row) for row in rows]


def record_artifact(connection: Connection, tenant: str, artifact: Artifact) -> None:
    """Within a transaction: the artifact exists and the tenant holds its blobs, which must be in the store.

    The dispatcher calls this in the transaction that ends a conversion, so that its output can be downloaded.
    """
    manifest = artifact.manifest
    row = {
        "tenant": tenant,
        "digest": str(manifest.digest),
        "kind": artifact.kind.value,
        "manifest": manifest.to_json(),
        "facts": dict(artifact.facts),
        "size_bytes": manifest.size_bytes,
        "created": artifact.created,
    }
    insert_missing(connection, artifacts, [row])
    hold(connection, tenant, {entry.digest: entry.size_bytes for entry in manifest.files}, artifact.created)


def hold(connection: Connection, tenant: str, sizes: Mapping[Digest, int], now: float) -> None:
    """Within a transaction: the tenant holds these blobs."""
    rows = [
        {"tenant": tenant, "digest": str(digest), "size_bytes": size, "created": now} for digest, size in sizes.items()
    ]
    insert_missing(connection, blobs, rows)


def held(connection: Connection, tenant: str, digests: Sequence[Digest]) -> dict[Digest, int]:
    found: dict[Digest, int] = {}
    for start in range(0, len(digests), BATCH):
        names = [str(digest) for digest in digests[start : start + BATCH]]
        query = select(blobs.c.digest, blobs.c.size_bytes).where(blobs.c.tenant == tenant, blobs.c.digest.in_(names))
        found |= {Digest(row.digest): row.size_bytes for row in connection.execute(query)}
    return found


def insert_missing(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert the rows whose key is not there yet, whoever else inserts at the same time."""
    insert = _INSERT[connection.dialect.name]
    for start in range(0, len(rows), BATCH):
        connection.execute(insert(table).on_conflict_do_nothing(), list(rows[start : start + BATCH]))


def _summary(row: RowMapping) -> Summary:
    count = len(json.loads(row["manifest"])["files"])
    return Summary(Digest(row["digest"]), ArtifactKind(row["kind"]), row["size_bytes"], count, row["created"])
