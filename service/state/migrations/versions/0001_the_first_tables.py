"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "artifacts",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("manifest", sa.LargeBinary(), nullable=False),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "digest", name=op.f("pk_artifacts")),
    )
    op.create_index("ix_artifacts_listing", "artifacts", ["tenant", "created", "digest"])

    op.create_table(
        "blobs",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "digest", name=op.f("pk_blobs")),
    )
    op.create_table(
        "cache",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("key", sa.String(length=71), nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=True),
        sa.Column("record", sa.JSON(), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("measured_by", sa.String(length=32), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "key", name=op.f("pk_cache")),
    )
    op.create_table(
        "conversions",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("requested_by", sa.String(length=64), nullable=False),
        sa.Column("request_id", sa.String(length=63), nullable=True),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("request_digest", sa.String(length=71), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("started", sa.Float(), nullable=True),
        sa.Column("ended", sa.Float(), nullable=True),
        sa.Column("queue_deadline", sa.Float(), nullable=True),
        sa.Column("run_seconds", sa.Float(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("crashes", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("lease_holder", sa.String(length=64), nullable=True),
        sa.Column("lease_expires", sa.Float(), nullable=True),
        sa.Column("failure", sa.JSON(), nullable=True),
        sa.Column("verdict", sa.String(length=16), nullable=True),
        sa.Column("output", sa.String(length=71), nullable=True),
        sa.Column("reused_from", sa.String(length=32), nullable=True),
        sa.Column("progress", sa.JSON(), nullable=True),
        sa.Column("last_sequence", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_conversions")),
        sa.UniqueConstraint("tenant", "request_id", name=op.f("uq_conversions_tenant")),
    )
    op.create_index("ix_conversions_listing", "conversions", ["tenant", "created", "id"])
    op.create_index("ix_conversions_queue", "conversions", ["state", "priority", "created"])

    op.create_table(
        "uploads",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("complete", sa.Boolean(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("expires", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_uploads")),
        sa.UniqueConstraint("tenant", "digest", name=op.f("uq_uploads_tenant")),
    )
    op.create_table(
        "checkpoints",
        sa.Column("conversion", sa.String(length=32), nullable=False),
        sa.Column("step", sa.String(length=64), nullable=False),
        sa.Column("key", sa.String(length=71), nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["conversion"], ["conversions.id"], name=op.f("fk_checkpoints_conversion_conversions")),
        sa.PrimaryKeyConstraint("conversion", "step", name=op.f("pk_checkpoints")),
    )
    op.create_table(
        "conversion_labels",
        sa.Column("conversion", sa.String(length=32), nullable=False),
        sa.Column("key", sa.String(length=63), nullable=False),
        sa.Column("value", sa.String(length=255), nullable=False),
        sa.ForeignKeyConstraint(
            ["conversion"], ["conversions.id"], name=op.f("fk_conversion_labels_conversion_conversions")
        ),
        sa.PrimaryKeyConstraint("conversion", "key", name=op.f("pk_conversion_labels")),
    )
    op.create_index("ix_conversion_labels_value", "conversion_labels", ["key", "value"])

    op.create_table(
        "events",
        sa.Column("conversion", sa.String(length=32), nullable=False),
        sa.Column("sequence", sa.Integer(), nullable=False),
        sa.Column("time", sa.Float(), nullable=False),
        sa.Column("kind", sa.String(length=24), nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["conversion"], ["conversions.id"], name=op.f("fk_events_conversion_conversions")),
        sa.PrimaryKeyConstraint("conversion", "sequence", name=op.f("pk_events")),
    )
    op.create_table(
        "steps",
        sa.Column("conversion", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("key", sa.String(length=71), nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=True),
        sa.Column("record", sa.JSON(), nullable=False),
        sa.Column("cached", sa.Boolean(), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("measured_by", sa.String(length=32), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["conversion"], ["conversions.id"], name=op.f("fk_steps_conversion_conversions")),
        sa.PrimaryKeyConstraint("conversion", "name", name=op.f("pk_steps")),
    )
