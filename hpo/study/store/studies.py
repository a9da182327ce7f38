"""A study as it is made, resumed with what may have changed, and bound to the data of its trials."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import optuna
import sqlalchemy as sa

from hpo.errors import StorageError, StudyChangedError
from hpo.redaction import redact
from hpo.study.claims.ending import end_unclaimed, reopen_ended_by_budget
from hpo.study.claims.snapshot import num_begun
from hpo.study.sampling.earlier import tried_first
from hpo.study.sampling.promotion import rungs_of
from hpo.study.store.optuna_internals import (
    create_study,
    enqueue_trials,
    find_study,
    set_study_attribute,
)
from hpo.study.store.orphans import remove_optuna_orphans
from hpo.study.store.schema import claims, delete_rows, evaluations, studies, workers
from hpo.study.store.storage import TOKEN_ATTR, Storage

if TYPE_CHECKING:
    from hpo.config.sections import BudgetConfig
    from hpo.config.study_config import StudyConfig

_logger = logging.getLogger(__name__)


def create_or_resume_study(storage: Storage, config: StudyConfig, *, resize: bool = True) -> optuna.Study:
    """Return the study of `config`, made if it is not there.

    Without `resize`, as for a worker that joins, the stored `n_trials` stays.

    Raises:
        StudyChangedError: the stored study was made with another search space or definition.
        StudyFileError: the earlier study that it names is not there.
    """

    def create_or_resume() -> optuna.Study:
        enqueued = [] if storage.has_study(config.name) else tried_first(storage, config)
        with storage.exclusive() as connection:
            n_trials = _create_or_resume(storage, connection, config, resize, enqueued)
        study = optuna.load_study(study_name=config.name, storage=storage.optuna)
        if resize:
            _give_up_surplus(storage, study, n_trials)
        return study

    return storage.persist(create_or_resume)


def _create_or_resume(
    storage: Storage,
    connection: sa.Connection,
    config: StudyConfig,
    resize: bool,
    enqueued: Sequence[tuple[Any, Any]],
) -> int:
    """Create or resume the study in the connection's transaction; return its number of trials."""
    study_id, token = find_study(connection, config.name, TOKEN_ATTR)
    row = connection.execute(sa.select(studies).where(studies.c.name == config.name)).one_or_none()
    if study_id is not None and (row is None or row.token != token):
        raise StorageError(
            f"The study `{config.name}` in {redact(storage.url)} was not made by hpo. "
            "Give yours another `name`, or use another database."
        )
    if row is None or study_id is None:
        delete_rows(connection, config.name)  # somebody may have deleted the Optuna study; the dashboard can
        remove_optuna_orphans(connection)  # the new study may get the id of a deleted one
        metric_names = [objective.metric for objective in config.objective]
        study_id = create_study(connection, config.name, config.directions, metric_names)
        new = {**_definition(config), "name": config.name, "token": uuid.uuid4().hex, "created": storage.now}
        connection.execute(sa.insert(studies).values(new))
        enqueue_trials(connection, study_id, enqueued)
        set_study_attribute(connection, study_id, TOKEN_ATTR, new["token"])
        return config.num_trials
    stored = json.loads(row.definition)
    resumed = _definition(config.resumed(stored))
    if not resize:
        return int(row.n_trials)
    if stored.get("budget") and config.budget is None:
        _logger.warning(
            "The study had a budget. Now it has none, and continues to %d trials.", config.num_trials
        )
    if _is_raised(stored.get("budget"), config.budget):
        reopen_ended_by_budget(connection, config.name)
    connection.execute(sa.update(studies).where(studies.c.name == config.name).values(resumed))
    return int(resumed["n_trials"])


def _is_raised(before: Mapping[str, Any] | None, now: BudgetConfig | None) -> bool:
    """Whether a study may spend more than before. A study without a budget may spend any time."""
    return before is not None and (now is None or now.hours > before["hours"])


def _definition(config: StudyConfig) -> dict[str, Any]:
    """The columns of `hpo_studies` that say what the study is."""
    definition = json.dumps(config.definition())
    return {"space_hash": config.space_hash, "n_trials": config.num_trials, "definition": definition}


def _give_up_surplus(storage: Storage, study: optuna.Study, n_trials: int) -> None:
    """Give up trials without a live worker if more than `n_trials` have begun, the last ones first."""
    name = study.study_name
    counted = (claims.c.study == name, claims.c.counts)
    begun = storage.read(lambda connection: num_begun(connection, name))
    if begun <= n_trials:
        return
    trials = {trial.number: trial for trial in study.get_trials(deepcopy=False)}

    def give_up_surplus(connection: sa.Connection) -> None:
        live = storage.live_workers(connection, workers.c.study == name)
        rows = connection.execute(sa.select(claims).where(*counted).order_by(claims.c.trial_number.desc()))
        surplus = [
            row
            for row in rows
            if row.owner not in live
            and row.trial_number in trials  # else it began after they were read
            and not trials[row.trial_number].state.is_finished()
            and not rungs_of(trials[row.trial_number].user_attrs)  # which end as PRUNED, and count
        ]
        for row in surplus[: begun - n_trials]:
            trial, reason = trials[row.trial_number], f"n_trials was lowered to {n_trials}."
            end_unclaimed(connection, name, trial, row.owner, reason)

    storage.write(give_up_surplus)


@dataclass(frozen=True)
class StoredStudy:
    """The part of a study that a worker reads at its start, whatever the number of its trials."""

    definition: dict[str, Any]
    state: str
    counts: dict[str, int]
    """See `Storage.trial_counts`."""
    has_trained: bool
    """Whether a trial has a checkpoint or an evaluation."""


def read_stored(storage: Storage, name: str) -> StoredStudy | None:
    """Return what is stored of the study `name`, but for its trials; None: there is none."""
    evaluated = sa.select(evaluations.c.step).where(evaluations.c.study == name).limit(1)
    saved = sa.select(claims.c.saved_step).where(claims.c.study == name, claims.c.saved_step > 0).limit(1)

    def read(connection: sa.Connection) -> tuple[list[sa.Row[Any]], bool]:
        has_trained = any(connection.execute(query).first() is not None for query in (evaluated, saved))
        return storage.studies(connection, studies.c.name == name), has_trained

    rows, has_trained = storage.read(read)
    if not rows:
        return None
    return StoredStudy(json.loads(rows[0].definition), rows[0].state, storage.trial_counts(name), has_trained)


def bind_data(storage: Storage, name: str, fingerprint: str) -> None:
    """Note which data the study `name` is made with, if none are noted yet; then `check_data`.

    The data's path is part of the definition, but a file may be edited in its place.
    """
    unbound = sa.update(studies).where(studies.c.name == name, studies.c.data.is_(None))
    storage.write(lambda connection: connection.execute(unbound.values(data=fingerprint)))
    check_data(storage, name, fingerprint)


def check_data(storage: Storage, name: str, fingerprint: str) -> None:
    """Raise StudyChangedError if the study is bound to data of another fingerprint."""
    if storage.stored(name, studies.c.data) not in (None, fingerprint):
        raise StudyChangedError(
            f"The data of the study `{name}` have changed since it was made, though they lie where they "
            "lay, so its results would not compare. Restore them, or give the study another `name`; `hpo "
            f"delete {name}` removes what is stored."
        )
