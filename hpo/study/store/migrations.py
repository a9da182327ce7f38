"""Versions of our tables: those of an earlier `hpo` are moved up, those of a later `hpo` are refused.

Alembic compares the tables that are there with `hpo.study.store.schema` and makes, adds and drops what
differs, whichever the earlier version was. So a new column may be null or has a default of the server's, and
a change that is more than that (a new name, other values) needs a step of its own in `upgrade`.

Tables of ours without `hpo_version` are of v1, which did not note its version.
"""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa
from alembic.autogenerate import produce_migrations
from alembic.operations import Operations
from alembic.operations.ops import OpContainer
from alembic.runtime.migration import MigrationContext

from hpo.errors import StorageError
from hpo.study.store import schema

VERSIONS = ("v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10")
"""The last is that of `schema`."""

_version = sa.Table("hpo_version", sa.MetaData(), sa.Column("version_num", sa.String(32), primary_key=True))
_V1_TABLES = {"hpo_studies", "hpo_slots", "hpo_workers", "hpo_evaluations", "hpo_compat"}
_FORMER = {
    "hpo_artifacts",
    "hpo_jobs",
    "hpo_slots.death_params",
    "hpo_slots.trained",
    *(f"hpo_workers.{column}" for column in ("oom_kills", "cause", "progress_at")),
}
"""Tables and columns of earlier versions, which are dropped. What somebody else has added stays."""


def stored_version(connection: sa.Connection) -> str | None:
    """The version of the tables in a database; None where it has none, or not all of them.

    Raises:
        StorageError: a later version of hpo made them.
    """
    names = set(sa.inspect(connection).get_table_names())
    if _version.name not in names:
        return VERSIONS[0] if names >= _V1_TABLES else None
    version = connection.execute(sa.select(_version.c.version_num)).scalar()
    if version not in VERSIONS:
        raise StorageError(
            f"The tables in {connection.engine.url.render_as_string()} must be of version {VERSIONS[-1]} or "
            f"earlier, but a later hpo has made them ({version}). Update hpo, or name another database."
        )
    return str(version)


def upgrade(connection: sa.Connection) -> None:
    """Make our tables, or move those of an earlier version up, in the connection's transaction."""
    if connection.dialect.name == "sqlite":  # sqlite3 begins a transaction only before a change of rows
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    operations = Operations(_context(connection))
    left = list(_differences(connection).ops)
    while left:
        operation = left.pop(0)
        if isinstance(operation, OpContainer):
            left += operation.ops
        else:
            operations.invoke(operation)
    _version.create(connection, checkfirst=True)
    connection.execute(sa.delete(_version))
    connection.execute(sa.insert(_version).values(version_num=VERSIONS[-1]))


def is_current(connection: sa.Connection) -> bool:
    """Whether the tables are of the newest version, and none of them and no column is missing.

    Raises:
        StorageError: a later version of hpo made them.
    """
    return stored_version(connection) == VERSIONS[-1] and _differences(connection).is_empty()


def _differences(connection: sa.Connection) -> OpContainer:
    """What would make the tables in a database those of `schema`."""
    operations = produce_migrations(_context(connection), schema.metadata).upgrade_ops
    assert operations is not None
    return operations


def _context(connection: sa.Connection) -> MigrationContext:
    bounds_texts = connection.dialect.name != "sqlite"  # which changes no type of a column either
    options = {"include_name": _is_ours, "compare_type": bounds_texts}
    return MigrationContext.configure(connection, opts=options)


def _is_ours(name: str | None, kind: str, parents: Mapping[str, str | None]) -> bool:
    ours = schema.metadata.tables
    if kind == "table":
        return name in ours or name in _FORMER
    table = ours.get(str(parents.get("table_name")))
    return kind != "column" or table is None or str(name) in table.c or f"{table.name}.{name}" in _FORMER
