"""What is wrong with a database, its studies and this host, each finding with what mends it.

A check is a function that yields findings. To add one, write it and put it into one of the two lists.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from optuna.exceptions import StorageInternalError
from sqlalchemy.exc import SQLAlchemyError

from hpo.cluster.doctor.study_checks import CHECKS, Examined, Finding
from hpo.errors import HpoError, NoDatabaseError
from hpo.study.store.database import connect, parse_url, place, sqlite_path
from hpo.study.store.failures import explain
from hpo.study.store.opening import optuna_storage
from hpo.study.store.storage import open_storage


def tables_of_optuna(url: str) -> Iterator[Finding]:
    """Those of an earlier Optuna, which a later one moves up; old workers do not survive that."""
    engine = connect(url)
    try:
        if not sa.inspect(engine).has_table("version_info"):
            return
    finally:
        engine.dispose()
    backend = optuna_storage(parse_url(url), skip_compatibility_check=True, skip_table_creation=True)
    try:
        current, newest = backend.get_current_version(), backend.get_head_version()
        is_earlier = current in backend.get_all_versions()
    finally:
        backend.engine.dispose()
    if current != newest and is_earlier:
        what = f"The tables of Optuna must be of version {newest}, but are of {current}."
        remedy = "Moves them up. End all workers first: those of an earlier Optuna cannot go on."
        yield Finding("error", what, remedy, backend.upgrade)
        backend.engine.dispose()


def examine(
    url: str, runs_dir: Path, *, study: str | None = None, fix: bool = False
) -> Generator[Finding, None, None]:
    """Yield what is wrong with the database at `url`, its studies (or `study` alone) and this host.

    With `fix`, each finding is mended before it is yielded, where it can be. The checks of studies are left
    out where the tables are not those of this hpo.

    Raises:
        StorageError: there is no such database, it does not answer, or it has no such study.
        HpoError: the database failed meanwhile.
    """
    path = sqlite_path(parse_url(url))
    if path is not None and not path.exists():
        raise NoDatabaseError(f"There is no study database at {place(url)}. `hpo run STUDY` makes one.")
    try:
        for finding in _run(tables_of_optuna, url, fix):
            yield finding
            if not finding.mended:
                return
        with open_storage(url, create=False) as storage:
            if study is not None:
                storage.load_study(study)
            for of_study in CHECKS:
                yield from _run(of_study, Examined(storage, runs_dir, study), fix)
    except (SQLAlchemyError, StorageInternalError) as error:
        raise explain(url, error) from error


def _run(check: Callable[[Any], Iterator[Finding]], subject: Any, fix: bool) -> Iterator[Finding]:
    for finding in check(subject):
        finding = replace(finding, check=check.__name__.replace("_", " "))
        if fix and finding.mend is not None:
            try:
                finding.mend()
                finding = replace(finding, mended=True)
            except (HpoError, OSError) as error:
                finding = replace(finding, remedy=f"{finding.remedy} That failed: {error}", mend=None)
        yield finding
