"""Foreign trials of another program, and orphans: rows of deleted studies and trials.

A worker inserts the claim of a trial in the transaction that begins the trial. So a begun trial without a
claim is foreign: samplers and pruners do not see it, and it counts for nothing. A waiting trial is not
foreign, whoever enqueued it. A trial of hpo that another program ends counts as failed.

SQLite checks no foreign keys, so a row that is written to a deleted study stays. It also gives ids of deleted
studies and trials to new ones, which would inherit such rows. Other programs delete nothing from our tables.
"""

from collections.abc import Iterator

import sqlalchemy as sa
from optuna.trial import TrialState

from hpo.study.store import optuna_internals
from hpo.study.store.optuna_internals import studies as optuna_studies
from hpo.study.store.optuna_internals import trials
from hpo.study.store.schema import claims, delete_rows, metadata, studies
from hpo.study.store.storage import Storage


def is_foreign(study: str) -> sa.ColumnElement[bool]:
    """Return the condition that a trial of this study is foreign, for a query of Optuna's trials."""
    claimed = sa.exists().where(claims.c.study == study, claims.c.trial_number == trials.c.number)
    return sa.and_(trials.c.state != TrialState.WAITING, ~claimed)


def in_state(study: str, state: TrialState) -> sa.Select[tuple[int, int]]:
    query = sa.select(trials.c.trial_id, trials.c.number).join(optuna_studies)
    query = query.where(optuna_studies.c.study_name == study, trials.c.state == state)
    return query.order_by(trials.c.number)


def _optuna_orphans(connection: sa.Connection) -> Iterator[tuple[sa.Table, sa.ColumnElement[bool]]]:
    if connection.dialect.name == "sqlite":  # PostgreSQL checks the foreign keys
        for table in optuna_internals.tables:
            parents = [~sa.exists().where(key.column == key.parent) for key in table.foreign_keys]
            if parents:
                yield table, sa.or_(*parents)


def count_optuna_orphans(connection: sa.Connection) -> dict[str, int]:
    """Count the rows of Optuna's tables without their study or trial, by table."""
    counts = {}
    for table, is_orphan in _optuna_orphans(connection):
        query = sa.select(sa.func.count()).select_from(table).where(is_orphan)
        counts[table.name] = connection.execute(query).scalar_one()
    return {name: count for name, count in counts.items() if count}


def remove_optuna_orphans(connection: sa.Connection) -> None:
    """Remove the rows of Optuna's tables without their study or trial."""
    for table, is_orphan in _optuna_orphans(connection):  # parents first: their rows are orphans then
        connection.execute(sa.delete(table).where(is_orphan))


def deleted_studies(storage: Storage, connection: sa.Connection) -> list[str]:
    """Return the names of studies with rows in our tables, but not in Optuna's."""
    existing = {row.name for row in storage.studies(connection)}
    named = [table.c.study for table in metadata.sorted_tables if "study" in table.c] + [studies.c.name]
    names = sa.union(*(sa.select(column) for column in named))
    return sorted(set(connection.execute(names).scalars()) - existing)


def remove_deleted(storage: Storage, name: str) -> None:
    """Remove our rows of a study that is missing in Optuna's tables."""

    def remove() -> None:
        with storage.exclusive() as connection:
            if name in deleted_studies(storage, connection):
                delete_rows(connection, name)

    storage.persist(remove)
