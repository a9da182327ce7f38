"""What is wrong with a database, its studies and this host, each finding with what mends it.

A check is a function that yields findings. To add one, write it and put it into one of the two lists.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

from optuna.exceptions import StorageInternalError
from sqlalchemy.exc import SQLAlchemyError

from hpo.cluster import database_checks, study_checks
from hpo.cluster.finding import Finding
from hpo.cluster.study_checks import Host, Patient
from hpo.errors import HpoError, NoDatabaseError
from hpo.study.database import explain, parse_url, place, sqlite_path
from hpo.study.storage import open_storage

DATABASE_CHECKS: Sequence[Callable[[str], Iterator[Finding]]] = (
    database_checks.database,
    database_checks.sqlite_on_network,
    database_checks.tables_of_optuna,
    database_checks.tables_of_hpo,
)
STUDY_CHECKS: Sequence[Callable[[Patient], Iterator[Finding]]] = (
    study_checks.sqlite_with_several_hosts,
    study_checks.clock_skew,
    study_checks.stale_trials,
    study_checks.checkpoints,
    study_checks.full_gpus,
    study_checks.data_of_studies,
    study_checks.progress,
)


def examine(
    url: str, host: Host, *, study: str | None = None, fix: bool = False
) -> Generator[Finding, None, None]:
    """Yield what is wrong with the database at `url`, its studies (or `study` alone) and this host.

    With `fix`, each finding is mended before it is yielded, where it can be. The checks of studies are left
    out where the tables are not those of this hpo.

    Raises:
        StorageError: there is no such database file, or no such study.
        HpoError: the database failed meanwhile.
    """
    try:
        yield from _examine(url, host, study, fix)
    except (SQLAlchemyError, StorageInternalError) as error:
        raise explain(url, error) from error


def _examine(url: str, host: Host, study: str | None, fix: bool) -> Iterator[Finding]:
    path = sqlite_path(parse_url(url))
    if path is not None and not path.exists():
        raise NoDatabaseError(f"There is no study database at {place(url)}. `hpo run STUDY` makes one.")
    usable = True
    for check in DATABASE_CHECKS:
        for finding in _run(check, url, fix):
            usable = usable and (
                finding.mended or finding.severity != "error" or check is database_checks.sqlite_on_network
            )
            yield finding
        if not usable:
            return
    with open_storage(url, create=False) as storage:
        if study is not None:
            storage.load_study(study)
        patient = Patient(storage, host, study)
        for study_check in STUDY_CHECKS:
            yield from _run(study_check, patient, fix)


def _run(check: Callable[[Any], Iterator[Finding]], subject: Any, fix: bool) -> Iterator[Finding]:
    for found in check(subject):
        finding = replace(found, check=check.__name__.replace("_", " "))
        if fix and finding.mend is not None:
            try:
                finding.mend()
                finding = replace(finding, mended=True)
            except (HpoError, OSError) as error:
                finding = replace(finding, remedy=f"{finding.remedy} That failed: {error}", mend=None)
        yield finding
