"""Studies that can be paused and have a priority; batch jobs; checkpoints in an artifact store."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from hpo.study import schema

revision = "v2"
down_revision = "v1"


def upgrade() -> None:
    op.add_column("hpo_studies", sa.Column("state", sa.String(10), nullable=False, server_default="open"))
    op.add_column("hpo_studies", sa.Column("priority", sa.Integer, nullable=False, server_default="0"))
    op.add_column("hpo_slots", sa.Column("saved_step", sa.Integer, nullable=False, server_default="0"))
    op.add_column("hpo_workers", sa.Column("job", sa.String(128)))
    columns = ["study", "state", "trial_number", "slot"]
    op.create_index("ix_hpo_slots_state", "hpo_slots", columns)
    for table in (schema.jobs, schema.artifacts):
        table.create(op.get_bind())
