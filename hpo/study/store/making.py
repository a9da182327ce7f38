"""How a study is made, and how it is resumed with what may have changed: its number of slots, above all."""

from __future__ import annotations

import json
import uuid
import warnings
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import optuna
import sqlalchemy as sa

from hpo.config.definition import has_order
from hpo.errors import StorageError
from hpo.outcome import Outcome
from hpo.study.store.database import redact
from hpo.study.store.optuna_internals import study_id_of
from hpo.study.store.schema import detailed_evaluations, evaluations, row_statistics, slots, studies

if TYPE_CHECKING:
    from hpo.config.study_config import StudyConfig
    from hpo.study.store.storage import Storage

TOKEN_ATTR = "hpo:token"
"""System attribute of a study: what tells it from a deleted one of the same name."""


def make_or_resume(storage: Storage, config: StudyConfig, resize: bool) -> optuna.Study:
    """See `Storage.create_or_resume_study`; to be called under `exclusive`."""
    study = optuna.create_study(
        study_name=config.name,
        storage=storage.optuna,
        directions=[objective.direction for objective in config.objective],
        load_if_exists=True,
    )
    token = storage.token_of(config.name)
    with storage.engine.begin() as connection:
        row = connection.execute(sa.select(studies).where(studies.c.name == config.name)).one_or_none()
        if row is not None and row.token != token:
            # The Optuna study was deleted (the dashboard can), and this is a new one of that name.
            connection.execute(sa.delete(studies).where(studies.c.name == config.name))
            for table in (slots, evaluations, detailed_evaluations, row_statistics):
                connection.execute(sa.delete(table).where(table.c.study == config.name))
            row = None
        if row is None:
            if token is None and study.get_trials(deepcopy=False):
                raise StorageError(
                    f"The study `{config.name}` in {redact(storage.url)} was not made by hpo. "
                    "Give yours another `name`, or use another database."
                )
            token = uuid.uuid4().hex
            values = {**_definition(config), "name": config.name, "token": token, "created": storage.now}
            connection.execute(sa.insert(studies).values(values))
        else:
            stored = json.loads(row.definition)
            completed = config.completed(stored)
            values = (
                _definition(completed, sort_keys=not has_order(stored))
                if resize
                else {"n_trials": row.n_trials}
            )
            # Also where nothing changes: from here on nobody else writes to a SQLite file.
            connection.execute(sa.update(studies).where(studies.c.name == config.name).values(values))
        live = storage.live_workers(connection, config.name)
        dropped = _resize(connection, config.name, values["n_trials"], live)
    if row is None:
        with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
            study.set_metric_names([objective.metric for objective in config.objective])
        # Last: a study without its token was not made to the end, and the next run begins it anew.
        storage.optuna.set_study_system_attr(study_id_of(study), TOKEN_ATTR, token)
    for trial in study.get_trials(deepcopy=False) if dropped else ():
        if trial.number in dropped and not trial.state.is_finished():
            reason = f"n_trials was lowered to {values['n_trials']}"
            storage.fail_trial(trial, Outcome.PREEMPTED, reason)
    return study


def _definition(config: StudyConfig, *, sort_keys: bool = False) -> dict[str, Any]:
    """The columns of `hpo_studies` that say what the study is."""
    definition = json.dumps(config.definition(), sort_keys=sort_keys)
    columns = {"space_hash": config.space_hash, "n_trials": config.num_slots, "priority": config.priority}
    return columns | {"definition": definition}


def _resize(
    connection: sa.Connection, study: str, n_trials: int, live_workers: Collection[str]
) -> set[int | None]:
    """Add slots, or drop those without a live worker; return the trial numbers of dropped ones."""
    of_study = slots.c.study == study
    count, last = connection.execute(
        sa.select(sa.func.count(), sa.func.max(slots.c.slot)).where(of_study)
    ).one()
    if count < n_trials:
        first = 0 if last is None else last + 1
        new = range(first, first + n_trials - count)
        connection.execute(sa.insert(slots), [{"study": study, "slot": slot} for slot in new])
    if count <= n_trials:
        return set()
    has_no_worker = sa.or_(
        slots.c.state == "open",
        sa.and_(slots.c.state == "running", slots.c.owner.not_in(live_workers)),
    )
    surplus = connection.execute(
        sa.select(slots.c.slot, slots.c.trial_number)
        .where(of_study, has_no_worker)
        .order_by(slots.c.trial_number.is_(None).desc(), slots.c.slot.desc())
        .limit(count - n_trials)
        .with_for_update(skip_locked=True)
    ).all()
    if surplus:
        gone = sa.delete(slots).where(of_study, slots.c.slot == sa.bindparam("gone"))
        connection.execute(gone, [{"gone": row.slot} for row in surplus])
    return {row.trial_number for row in surplus}
