"""Our tables in the study's database. Times are seconds since 1970 by the database's clock.

A change of the tables needs a new `VERSION`: `opening` refuses a database of another version.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

VERSION = "v12"

metadata = sa.MetaData()
_NAME = sa.String(512)  # the length that Optuna allows

studies = sa.Table(
    "hpo_studies",
    metadata,
    sa.Column("name", _NAME, primary_key=True),
    sa.Column("token", sa.String(32), nullable=False),  # identifies the Optuna study of this name
    sa.Column("definition", sa.Text, nullable=False),
    sa.Column("space_hash", sa.String(64), nullable=False),
    sa.Column("n_trials", sa.Integer, nullable=False),
    sa.Column("state", sa.String(10), nullable=False, server_default="open"),  # open, paused, cancelled
    sa.Column("data", sa.Text),  # fingerprint of its training data
    sa.Column("created", sa.Float, nullable=False),
)

claims = sa.Table(
    "hpo_claims",
    metadata,
    sa.Column("study", _NAME, primary_key=True),
    sa.Column("trial_number", sa.Integer, primary_key=True),
    # True: the trial is one of the `n_trials`. False for a failed attempt and for a trial that was given up.
    sa.Column("counts", sa.Boolean, nullable=False, default=True),
    sa.Column("owner", sa.String(128)),  # the worker of the trial; NULL: nobody
    sa.Column("paused_at", sa.Float),  # the rung of a paused trial; NULL: not paused
    # JSON of the user attributes of a paused trial's last run. The trial gets them at its end, because Optuna
    # reads the attributes of a RUNNING trial at every call.
    sa.Column("facts", sa.Text),
    sa.Column("point", sa.String(32)),  # of a grid or a comparison, see `hpo.study.sampling.points`
    sa.Column("host", sa.String(256)),  # of its newest checkpoint
    sa.Column("saved_step", sa.Integer, nullable=False, default=0),  # of its newest checkpoint
    # Deaths of its workers in a row without progress, and the step from which it continues after the last.
    sa.Column("deaths", sa.Integer, nullable=False, default=0),
    sa.Column("death_step", sa.Integer, nullable=False, default=0),
    sa.Column("active_seconds", sa.Float, nullable=False, default=0.0),  # with a worker
    sa.Column("device_seconds", sa.Float, nullable=False, default=0.0),  # counted by a budget
)

sa.Index("ix_hpo_claims_counts", claims.c.study, claims.c.counts)

workers = sa.Table(
    "hpo_workers",
    metadata,
    sa.Column("id", sa.String(128), primary_key=True),
    sa.Column("study", _NAME, nullable=False, index=True),
    sa.Column("host", sa.String(256), nullable=False),
    sa.Column("machine", sa.String(128), nullable=False),  # the scope of `pid`
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("process_start", sa.String(64), nullable=False),
    sa.Column("started", sa.Float, nullable=False),
    sa.Column("last_seen", sa.Float, nullable=False),
    sa.Column("state", sa.String(8), nullable=False),  # live, left, dead (in a copy)
    sa.Column("number", sa.Integer, nullable=False),  # unique within the study
    sa.Column("device", sa.String(128)),  # `DeviceInfo.device_id`, within the machine
    sa.Column("job", sa.String(128)),  # of the scheduler, see `process.this_job`
    sa.Column("left_out", sa.Text),  # JSON list of precisions missing on its device, by `choice_name`
    sa.Column("progress", sa.Text),  # JSON of its trial's `hpo.outcome.Progress`
    sa.UniqueConstraint("study", "number"),
)

evaluations = sa.Table(
    "hpo_evaluations",
    metadata,
    sa.Column("study", _NAME, primary_key=True),
    sa.Column("trial_number", sa.Integer, primary_key=True),
    sa.Column("step", sa.Integer, primary_key=True),
    sa.Column("epoch", sa.Float, nullable=False),
    sa.Column("seconds", sa.Float, nullable=False),
    sa.Column("metrics", sa.Text, nullable=False),  # JSON
    sa.Column("train_examples_per_second", sa.Float),
    sa.Column("train_tokens_per_second", sa.Float),
)


@dataclass(frozen=True)
class EvaluationRow:
    step: int  # step of the trial; increases with each evaluation
    epoch: float
    seconds: float
    metrics: Mapping[str, Any]  # task -> metric -> value, and the objectives by name
    train_examples_per_second: float | None = None
    train_tokens_per_second: float | None = None


detailed_evaluations = sa.Table(
    "hpo_detailed_evaluations",
    metadata,
    sa.Column("study", _NAME, primary_key=True),
    sa.Column("trial_number", sa.Integer, primary_key=True),
    sa.Column("split", sa.String(16), primary_key=True),
    sa.Column("document", sa.Text, nullable=False),  # JSON
    sa.Column("created", sa.Float, nullable=False),
)

row_statistics = sa.Table(
    "hpo_row_statistics",
    metadata,
    sa.Column("study", _NAME, primary_key=True),
    sa.Column("trial_number", sa.Integer, primary_key=True),
    sa.Column("content", sa.LargeBinary, nullable=False),  # of `hpo.study.reading.detailed_evaluations`
)

compat = sa.Table(
    "hpo_compat",
    metadata,
    sa.Column("key", sa.String(64), primary_key=True),
    sa.Column("result", sa.Text, nullable=False),  # JSON
    sa.Column("created", sa.Float, nullable=False),
)

version = sa.Table("hpo_version", sa.MetaData(), sa.Column("version_num", sa.String(32), primary_key=True))


def create_tables(connection: sa.Connection) -> None:
    """Create our tables and store their version, in the connection's transaction."""
    metadata.create_all(connection)
    version.create(connection)
    connection.execute(sa.insert(version).values(version_num=VERSION))


def stored_version(connection: sa.Connection) -> str | None:
    names = set(sa.inspect(connection).get_table_names())
    if not names & {version.name, studies.name}:
        return None
    stored = version.name in names and connection.execute(sa.select(version.c.version_num)).scalar()
    return stored or "an unknown version"


def delete_rows(connection: sa.Connection, study: str) -> None:
    for table in metadata.sorted_tables:
        if "study" in table.c:
            connection.execute(sa.delete(table).where(table.c.study == study))
    connection.execute(sa.delete(studies).where(studies.c.name == study))
