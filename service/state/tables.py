"""All tables. SQLAlchemy Core, the same on SQLite (WAL) and PostgreSQL. Times are UTC seconds since the epoch.

uploads ─┐                         ┌─ events       what Watch sends
blobs ───┼─ artifacts ── conversions ─ steps       finished steps of one conversion
         │                         └─ checkpoints  newest checkpoint of a running step
         └─ cache                                  step results by key, across conversions
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    UniqueConstraint,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(column_0_label)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

DIGEST = String(71)

blobs = Table(
    "blobs",
    metadata,
    Column("tenant", String(64), primary_key=True),
    Column("digest", DIGEST, primary_key=True),
    Column("size_bytes", BigInteger, nullable=False),
    Column("created", Float, nullable=False),
)
"""Which tenant holds which blob: FindMissing and CreateArtifact look here, never at the store alone."""

uploads = Table(
    "uploads",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("digest", DIGEST, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("complete", Boolean, nullable=False),
    Column("created", Float, nullable=False),
    Column("expires", Float, nullable=False),
    UniqueConstraint("tenant", "digest"),
)

artifacts = Table(
    "artifacts",
    metadata,
    Column("tenant", String(64), primary_key=True),
    Column("digest", DIGEST, primary_key=True),
    Column("kind", String(16), nullable=False),
    Column("manifest", LargeBinary, nullable=False),
    Column("facts", JSON, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("created", Float, nullable=False),
    Index("ix_artifacts_listing", "tenant", "created", "digest"),
)
"""`manifest` is the canonical JSON; `facts` is what intake read from the files (service.intake)."""

conversions = Table(
    "conversions",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("requested_by", String(64), nullable=False),
    Column("request_id", String(63)),
    Column("request", JSON, nullable=False),
    Column("request_digest", DIGEST, nullable=False),
    Column("state", String(16), nullable=False),
    Column("priority", Integer, nullable=False),
    Column("created", Float, nullable=False),
    Column("started", Float),
    Column("ended", Float),
    Column("queue_deadline", Float),
    Column("run_seconds", Float, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("crashes", Integer, nullable=False),
    Column("version", Integer, nullable=False),
    Column("fence", Integer, nullable=False),
    Column("lease_holder", String(64)),
    Column("lease_expires", Float),
    Column("failure", JSON),
    Column("verdict", String(16)),
    Column("output", DIGEST),
    Column("reused_from", String(32)),
    Column("progress", JSON),
    Column("last_sequence", Integer, nullable=False),
    UniqueConstraint("tenant", "request_id"),
    Index("ix_conversions_queue", "state", "priority", "created"),
    Index("ix_conversions_listing", "tenant", "created", "id"),
)
"""`request` is the request as canonical values; `run_seconds` the time that all attempts ran so far;
`crashes` counts workers that died without an answer since a step finished."""

conversion_labels = Table(
    "conversion_labels",
    metadata,
    Column("conversion", String(32), ForeignKey("conversions.id"), primary_key=True),
    Column("key", String(63), primary_key=True),
    Column("value", String(255), nullable=False),
    Index("ix_conversion_labels_value", "key", "value"),
)

events = Table(
    "events",
    metadata,
    Column("conversion", String(32), ForeignKey("conversions.id"), primary_key=True),
    Column("sequence", Integer, primary_key=True),
    Column("time", Float, nullable=False),
    Column("kind", String(24), nullable=False),
    Column("body", JSON, nullable=False),
)

steps = Table(
    "steps",
    metadata,
    Column("conversion", String(32), ForeignKey("conversions.id"), primary_key=True),
    Column("name", String(64), primary_key=True),
    Column("key", DIGEST, nullable=False),
    Column("digest", DIGEST),
    Column("record", JSON, nullable=False),
    Column("cached", Boolean, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("measured_by", String(32), nullable=False),
    Column("created", Float, nullable=False),
)

cache = Table(
    "cache",
    metadata,
    Column("tenant", String(64), primary_key=True),
    Column("key", DIGEST, primary_key=True),
    Column("digest", DIGEST),
    Column("record", JSON, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("measured_by", String(32), nullable=False),
    Column("created", Float, nullable=False),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("conversion", String(32), ForeignKey("conversions.id"), primary_key=True),
    Column("step", String(64), primary_key=True),
    Column("key", DIGEST, nullable=False),
    Column("digest", DIGEST, nullable=False),
    Column("created", Float, nullable=False),
)
