"""Creation of a study with its first trials, its resumption with allowed changes, its binding to data."""

import json
import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
import sqlalchemy as sa
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpo.config.definition import widened_ranges
from hpo.config.first import EarlierResults, fitting
from hpo.config.limits import violation
from hpo.config.sections import BudgetConfig
from hpo.config.study_config import StudyConfig
from hpo.config.study_file import show
from hpo.errors import InputError, StorageError, StudyChangedError
from hpo.redaction import redact
from hpo.study.store.failures import definition_of
from hpo.study.store.foreign import in_state, is_foreign, remove_optuna_orphans
from hpo.study.store.optuna_internals import (
    create_study,
    enqueue_trials,
    find_study,
    reopen_trial,
    set_study_attribute,
    trials,
    user_attributes,
)
from hpo.study.store.schema import claims, delete_rows, evaluations, studies
from hpo.study.store.storage import TOKEN_ATTR, Storage

SOURCE_ATTR = "source"  # user attribute of a first trial: the source of its configuration
BUDGET_SPENT = "the budget of the study was not enough for more."
"""Reason of a trial ended by the study's budget. It continues if the budget is raised."""

_logger = logging.getLogger(__name__)


def create_or_resume_study(storage: Storage, config: StudyConfig, *, resize: bool = True) -> optuna.Study:
    """Return the study of `config`, created if it does not exist.

    Begun trials continue after a lower `n_trials`. Without `resize`, for a joining worker, the stored number
    stays. Raises StudyChangedError for another search space or definition, InputError without its earlier
    study.
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
    stored = definition_of(row.name, row.definition)
    resumed = _definition(config.resumed(stored))
    wider = widened_ranges(stored, json.loads(resumed["definition"]))
    if config.num_trials == stored["n_trials"]:
        resumed["n_trials"] = max(config.num_trials, row.n_trials)  # `hpo enqueue` has added trials
    if not resize and not wider:
        return
    if not resize:
        raise StudyChangedError(f"The range of {', '.join(wider)} is wider now. `hpo run` stores that.")
    if wider:
        message = "The range of %s is wider now. Workers that run keep the old one until they start again."
        _logger.warning(message, ", ".join(wider))
    if stored.get("budget") and config.budget is None:
        _logger.warning(
            "The study had a budget. Now it has none, and continues to %d trials.", config.num_trials
        )
    if _is_raised(stored.get("budget"), config.budget):
        _reopen_ended_by_budget(connection, config.name)
    connection.execute(sa.update(studies).where(studies.c.name == config.name).values(resumed))


def _is_raised(before: Mapping[str, Any] | None, now: BudgetConfig | None) -> bool:
    return before is not None and (now is None or now.hours > before["hours"])


def _reopen_ended_by_budget(connection: sa.Connection, study: str) -> None:
    """Let trials run again after their study's budget, which had ended them, was raised.

    Optuna's storage reads the end of a trial once. So a worker that has already read these ends leaves the
    trials to workers that start later.
    """
    reason = (
        user_attributes.c.key == "outcome_reason",
        user_attributes.c.value_json == json.dumps(BUDGET_SPENT),
    )
    pruned = in_state(study, TrialState.PRUNED).where(~is_foreign(study))
    ended = pruned.join(user_attributes, user_attributes.c.trial_id == trials.c.trial_id).where(*reason)
    for row in connection.execute(ended).all():
        reopen_trial(connection, row.trial_id, ("outcome", "outcome_reason"))


def _definition(config: StudyConfig) -> dict[str, Any]:
    definition = json.dumps(config.definition())
    return {"space_hash": config.space_hash, "n_trials": config.num_trials, "definition": definition}


def tried_first(storage: Storage, config: StudyConfig) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """Return the parameters and attributes of the first trials, at most `n_trials`. Raises InputError."""
    if config.comparison is not None:
        return []
    if isinstance(config.first, EarlierResults):
        first = list(_best_fitting(storage, config, config.first))
    else:
        fits = [fitting(config.search_space, params) for params in config.first]
        first = [(params, f"first.{index}") for index, params in enumerate(fits)]
    if (surplus := len(first) - config.num_trials) > 0:
        message = "first: only %d of %d configurations are tried, as the study has no more trials."
        _logger.warning(message, config.num_trials, config.num_trials + surplus)
    return [(params, {SOURCE_ATTR: source}) for params, source in first[: config.num_trials]]


def _best_fitting(
    storage: Storage, config: StudyConfig, earlier: EarlierResults
) -> Iterator[tuple[dict[str, Any], str]]:
    used: list[dict[str, Any]] = []
    left_out: set[str] = set()
    for trial in _ranked_trials(storage, config, earlier.study):
        fits = fitting(config.search_space, trial.params)
        lacking = sorted(trial.params.keys() - fits.keys())
        left_out |= {*lacking}
        if fits and fits not in used:
            used.append(fits)
            without = f" without its {', '.join(lacking)}" if lacking else ""
            yield fits, f"trial {trial.number} of {earlier.study}{without}"
        if len(used) == earlier.top:
            break
    if left_out or len(used) < earlier.top:
        names = ", ".join(f"`{name}`" for name in sorted(left_out)) or "nothing"
        message = "first: %d configurations of earlier trials are tried; left out, as they do not fit: %s."
        _logger.warning(message, len(used), names)


def _ranked_trials(storage: Storage, config: StudyConfig, name: str) -> list[FrozenTrial]:
    try:
        study = storage.load_study(name)
    except StorageError as error:
        raise InputError(f"`first.study` of {show(config.name)}: {error}") from None
    if len(study.directions) > 1:
        message = f"must have one objective, but {show(name)} has several."
        raise InputError(f"`first.study` of {show(config.name)} {message}")
    sign = -1.0 if study.direction == StudyDirection.MAXIMIZE else 1.0
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return sorted(complete, key=lambda trial: (violation(trial.constraints), sign * trial.values[0]))


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
    definition = definition_of(name, rows[0].definition)
    return StudyEntry(definition, rows[0].state, storage.trial_counts(name), has_trained)


def bind_data(storage: Storage, name: str, fingerprint: str) -> None:
    """Bind the study to its data by their fingerprint, unless it is bound; then `check_data`."""
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
