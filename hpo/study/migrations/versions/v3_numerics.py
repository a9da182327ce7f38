"""Numeric telemetry of the step before each evaluation."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v3"
down_revision = "v2"


def upgrade() -> None:
    op.add_column("hpo_evaluations", sa.Column("numerics", sa.Text))
