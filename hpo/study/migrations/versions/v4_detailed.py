"""Detailed evaluations of the best trials."""

from __future__ import annotations

from alembic import op

from hpo.study import schema

revision = "v4"
down_revision = "v3"


def upgrade() -> None:
    schema.detailed_evaluations.create(op.get_bind())
