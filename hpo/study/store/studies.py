"""Creation of a study, its resumption with allowed changes, and its binding to data."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
import sqlalchemy as sa

from hpo.config.sections import BudgetConfig
from hpo.config.study_config import StudyConfig
from hpo.errors import StorageError, StudyChangedError
from hpo.redaction import redact
from hpo.study.claims.ending import reopen_ended_by_budget
from hpo.study.sampling.earlier import tried_first
from hpo.study.store.optuna_internals import (
    create_study,
    enqueue_trials,
    find_study,
    set_study_attribute,
)
from hpo.study.store.orphans import remove_optuna_orphans
from hpo.study.store.schema import claims, delete_rows, evaluations, studies
from hpo.study.store.storage import TOKEN_ATTR, Storage

_logger = logging.getLogger(__name__)


def create_or_resume_study(storage: Storage, config: StudyConfig, *, resize: bool = True) -> optuna.Study:
    """Return the study of `config`, created if it does not exist.

    A lower `n_trials` begins no further trial; begun trials continue to their end. Without `resize`, for a
    joining worker, the stored `n_trials` stays.

    Raises:
        StudyChangedError: the stored study has another search space or definition.
        StudyFileError: its earlier study does not exist.
    """

    def create_or_resume() -> optuna.Study:
        enqueued = [] if storage.has_study(config.name) else tried_first(storage, config)
        with storage.exclusive() as connection:
            _create_or_resume(storage, connection, config, resize, enqueued)
        return optuna.load_study(study_name=config.name, storage=storage.optuna)

    return storage.persist(create_or_resume)


def _create_or_resume(
    storage: Storage,
    connection: sa.Connection,
    config: StudyConfig,
    resize: bool,
    enqueued: Sequence[tuple[Any, Any]],
) -> None:
    study_id, token = find_study(connection, config.name, TOKEN_ATTR)
    row = connection.execute(sa.select(studies).where(studies.c.name == config.name)).one_or_none()
    if study_id is not None and (row is None or row.token != token):
        raise StorageError(
            f"The study `{config.name}` in {redact(storage.url)} was not made by hpo. "
            "Give yours another `name`, or use another database."
        )
    if row is None or study_id is None:
        delete_rows(connection, config.name)  # the dashboard may have deleted the Optuna study
        remove_optuna_orphans(connection)  # the new study may get the id of a deleted one
        metric_names = [objective.metric for objective in config.objective]
        study_id = create_study(connection, config.name, config.directions, metric_names)
        new = {**_definition(config), "name": config.name, "token": uuid.uuid4().hex, "created": storage.now}
        connection.execute(sa.insert(studies).values(new))
        enqueue_trials(connection, study_id, enqueued)
        set_study_attribute(connection, study_id, TOKEN_ATTR, new["token"])
        return
    stored = json.loads(row.definition)
    resumed = _definition(config.resumed(stored))
    if not resize:
        return
    if stored.get("budget") and config.budget is None:
        _logger.warning(
            "The study had a budget. Now it has none, and continues to %d trials.", config.num_trials
        )
    if _is_raised(stored.get("budget"), config.budget):
        reopen_ended_by_budget(connection, config.name)
    connection.execute(sa.update(studies).where(studies.c.name == config.name).values(resumed))


def _is_raised(before: Mapping[str, Any] | None, now: BudgetConfig | None) -> bool:
    return before is not None and (now is None or now.hours > before["hours"])


def _definition(config: StudyConfig) -> dict[str, Any]:
    definition = json.dumps(config.definition())
    return {"space_hash": config.space_hash, "n_trials": config.num_trials, "definition": definition}


@dataclass(frozen=True)
class StudyEntry:
    """Facts about a study for a starting worker; their size does not grow with the number of trials."""

    definition: dict[str, Any]
    state: str
    counts: dict[str, int]  # see `Storage.trial_counts`
    has_trained: bool  # true if a trial has a checkpoint or an evaluation


def read_stored(storage: Storage, name: str) -> StudyEntry | None:
    """Return the stored facts about the study, or None if it does not exist."""
    evaluated = sa.exists().where(evaluations.c.study == name)
    saved = sa.exists().where(claims.c.study == name, claims.c.saved_step > 0)

    def read(connection: sa.Connection) -> tuple[list[sa.Row[Any]], bool]:
        has_trained = bool(connection.execute(sa.select(sa.or_(evaluated, saved))).scalar())
        return storage.studies(connection, studies.c.name == name), has_trained

    rows, has_trained = storage.read(read)
    if not rows:
        return None
    return StudyEntry(json.loads(rows[0].definition), rows[0].state, storage.trial_counts(name), has_trained)


def bind_data(storage: Storage, name: str, fingerprint: str) -> None:
    """Bind the study to its data by their fingerprint, unless it is bound; then `check_data`.

    The definition contains the data's path only, and somebody may edit the file.
    """
    unbound = sa.update(studies).where(studies.c.name == name, studies.c.data.is_(None))
    storage.write(lambda connection: connection.execute(unbound.values(data=fingerprint)))
    check_data(storage, name, fingerprint)


def check_data(storage: Storage, name: str, fingerprint: str) -> None:
    """Raise StudyChangedError if the study is bound to other data."""
    if storage.stored(name, studies.c.data) not in (None, fingerprint):
        raise StudyChangedError(
            f"The data of the study `{name}` have changed since it was made, so its results would not "
            f"compare. Restore them, or give the study another `name`; `hpo delete {name}` removes "
            "the stored study."
        )
