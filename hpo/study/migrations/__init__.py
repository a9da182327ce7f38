"""Versions of our tables: a database of an earlier `hpo` is moved up, one of a later `hpo` is refused.

Each version is a file in `versions/`, an Alembic revision; the newest is what `hpo.study.schema` describes.
A new database gets its tables from there at once. One without `hpo_version` but with our tables is of v1,
which did not note its version.
"""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from hpo.errors import StorageError
from hpo.study import schema

_VERSION_TABLE = "hpo_version"
_FIRST = "v1"
_V1_TABLES = ("hpo_studies", "hpo_slots", "hpo_workers", "hpo_evaluations", "hpo_compat")


def newest_version() -> str:
    """The version of the tables that this `hpo` uses."""
    return str(_scripts().get_current_head())


def stored_version(connection: sa.Connection) -> str | None:
    """The version of the tables in a database; None where it has none, or not all of them.

    Raises:
        StorageError: a later version of hpo made them.
    """
    names = sa.inspect(connection).get_table_names()
    if _VERSION_TABLE not in names:
        return _FIRST if set(_V1_TABLES) <= set(names) else None
    context = MigrationContext.configure(connection, opts={"version_table": _VERSION_TABLE})
    version = context.get_current_revision()
    if version not in {script.revision for script in _scripts().walk_revisions()}:
        raise StorageError(
            f"The tables in {connection.engine.url.render_as_string()} must be of version {newest_version()} "
            f"or earlier, but a later hpo has made them ({version}). Update hpo, or name another database."
        )
    return version


def upgrade(connection: sa.Connection) -> None:
    """Make our tables, or move those of an earlier version up to the newest, in the connection's transaction.

    Raises:
        StorageError: a later version of hpo made them.
    """
    scripts, version = _scripts(), stored_version(connection)
    context = MigrationContext.configure(connection, opts={"version_table": _VERSION_TABLE})
    if version is None:
        schema.metadata.create_all(connection)
        context.stamp(scripts, newest_version())
        return
    if version == _FIRST:
        context.stamp(scripts, _FIRST)

    def steps(revision: str, _context: MigrationContext) -> object:
        return scripts._upgrade_revs("head", revision)

    with EnvironmentContext(Config(), scripts, fn=steps) as environment:
        environment.configure(connection=connection, version_table=_VERSION_TABLE)
        environment.run_migrations()


def differences(connection: sa.Connection) -> dict[str, bool]:
    """How our tables differ from `schema`, each difference with whether a whole table is missing."""
    options = {"include_name": lambda name, kind, _: kind != "table" or name in schema.metadata.tables}
    found: dict[str, bool] = {}
    for change in compare_metadata(MigrationContext.configure(connection, opts=options), schema.metadata):
        # A change of a column comes as a list; what it begins with is what would make the tables right.
        kind, *about = change[0] if isinstance(change, list) else change
        if kind == "add_table":
            found[f"The table `{about[0].name}` is missing."] = True
        elif kind in ("add_column", "remove_column"):
            what = "is missing" if kind == "add_column" else "is not of this hpo"
            found[f"The column `{about[1]}.{about[2].name}` {what}."] = False
        elif kind not in ("add_index", "add_constraint") or about[0].table.name not in str(found):
            named = ".".join(part for part in about if isinstance(part, str)) or about[0]
            found[f"The tables of hpo differ in {named}: it needs `{kind}`."] = False
    return found


def _scripts() -> ScriptDirectory:
    return ScriptDirectory(str(Path(__file__).parent))
