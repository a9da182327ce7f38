"""A whole study read at once, for status, reports and the dashboard.

Optuna builds an object with its own queries for every attribute of a trial, which takes seconds for
thousands of trials. Here it is one query a table.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import sqlalchemy as sa
from optuna.distributions import BaseDistribution, json_to_distribution
from optuna.trial import TrialState

from hpo.config.study_config import check_study_name
from hpo.outcome import Outcome
from hpo.study.claims.budget import StudyBudget
from hpo.study.reading.detailed_evaluations import read_detailed_evaluations
from hpo.study.reading.study_record import EvaluationRow, StudyRecord, TrialRecord, WorkerRecord
from hpo.study.store import optuna_internals, schema
from hpo.study.store.database import snapshot
from hpo.study.store.optuna_internals import study_id_of
from hpo.study.store.storage import COMPARISON_ATTR, Storage


def read_study(storage: Storage, name: str) -> StudyRecord:
    """Read everything stored about the study `name`. Raises StorageError where there is none."""
    check_study_name(name)  # of the folder for its report, too

    def read() -> StudyRecord:
        study_id = study_id_of(storage.load_study(name))
        with snapshot(storage.engine) as connection:  # what ends in between would be read in halves
            return _read(storage, connection, study_id, name)

    return storage.persist(read)


def _read(storage: Storage, connection: sa.Connection, study_id: int, name: str) -> StudyRecord:
    of_study = sa.select(schema.studies).where(schema.studies.c.name == name)
    study = connection.execute(of_study).one()
    definition = json.loads(study.definition)
    claims = connection.execute(sa.select(schema.claims).where(schema.claims.c.study == name)).all()
    running = {claim.owner: claim.trial_number for claim in claims if claim.owner is not None}
    members = sa.select(schema.workers, storage.now.label("now")).where(schema.workers.c.study == name)
    heard = storage.heard_workers(connection, schema.workers.c.study == name)
    workers = [
        WorkerRecord(
            id=row.id,
            host=row.host,
            pid=row.pid,
            last_seen=datetime.fromtimestamp(max(0.0, min(row.last_seen, row.now)), UTC),
            alive=row.id in heard,
            trial_number=running.get(row.id),
            number=row.number,
            device=row.device,
            job=row.job,
            silent_seconds=row.now - row.last_seen,
        )
        for row in connection.execute(members.order_by(schema.workers.c.started))
    ]
    alive = {worker.id for worker in workers if worker.alive}
    state_of = {claim.trial_number: _state_of(claim, alive) for claim in claims}
    trials = _read_trials(connection, study_id, name, state_of)
    counted = {claim.trial_number for claim in claims if claim.counts}
    counts = Counter({"open": 0, "running": 0, "done": 0})
    counts.update(_count_of(trial) for trial in trials if trial.number in counted)
    counts["open"] += max(0, study.n_trials - counts.total())
    return StudyRecord(
        name=name,
        metric_names=tuple(objective["metric"] for objective in definition["objective"]),
        directions=tuple(objective["direction"] for objective in definition["objective"]),
        definition=definition,
        trials=trials,
        workers=workers,
        counts=dict(counts),
        state=study.state,
        spent=StudyBudget(name).spent(connection),
        comparisons=_read_comparisons(connection, study_id),
    )


def _state_of(claim: Any, alive: set[str]) -> tuple[str, str | None]:
    """What a RUNNING trial with this claim is, and its worker."""
    if claim.owner in alive:
        return "running", claim.owner
    return Outcome.PREEMPTED if claim.paused_at is None else Outcome.PAUSED, None


def _count_of(trial: TrialRecord) -> str:
    if trial.ended is not None:
        return "done"
    return trial.outcome if trial.outcome in ("running", "paused") else "open"


def _read_comparisons(connection: sa.Connection, study_id: int) -> dict[str, Any]:
    table = optuna_internals.study_user_attributes
    of_study = sa.select(table).where(table.c.study_id == study_id, table.c.key.startswith(COMPARISON_ATTR))
    rows = connection.execute(of_study)
    return {row.key.removeprefix(COMPARISON_ATTR): json.loads(row.value_json) for row in rows}


def _read_trials(
    connection: sa.Connection, study_id: int, name: str, state_of: dict[int, tuple[str, str | None]]
) -> list[TrialRecord]:
    """`state_of` has what a trial is while it is RUNNING, and its worker, by the trial's number."""
    trials = optuna_internals.trials
    parts = _read_parts(connection, study_id)
    evaluations = _read_evaluations(connection, name)
    detailed = read_detailed_evaluations(connection, name)
    query = sa.select(trials).where(trials.c.study_id == study_id).order_by(trials.c.number)
    return [
        replace(
            _trial(row, parts, *state_of.get(row.number, ("running", None))),
            evaluations=evaluations[row.number],
            detailed=detailed.get(row.number, {}),
        )
        for row in connection.execute(query)
    ]


@dataclass(frozen=True)
class _Parts:
    """What Optuna's tables have of the trials of a study, by their ids."""

    params: dict[int, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    distributions: dict[int, dict[str, BaseDistribution]] = field(default_factory=lambda: defaultdict(dict))
    values: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    attributes: dict[int, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    system_attrs: dict[int, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))


def _read_parts(connection: sa.Connection, study_id: int) -> _Parts:
    trials, parts = optuna_internals.trials, _Parts()
    in_study = sa.select(trials.c.trial_id).where(trials.c.study_id == study_id)

    def of_trials(table: sa.Table, *order: str) -> Sequence[Any]:
        query = sa.select(table).where(table.c.trial_id.in_(in_study))
        return connection.execute(query.order_by(*(table.c[column] for column in order))).all()

    for row in of_trials(optuna_internals.params, "param_id"):
        distribution = _distribution(row.distribution_json)
        parts.distributions[row.trial_id][row.param_name] = distribution
        parts.params[row.trial_id][row.param_name] = distribution.to_external_repr(row.param_value)
    for row in of_trials(optuna_internals.table_of_values, "trial_id", "objective"):
        parts.values[row.trial_id].append(row.value)
    for row in of_trials(optuna_internals.user_attributes, "trial_user_attribute_id"):
        parts.attributes[row.trial_id][row.key] = json.loads(row.value_json)
    for row in of_trials(optuna_internals.system_attributes):
        parts.system_attrs[row.trial_id][row.key] = json.loads(row.value_json)
    return parts


def _trial(row: Any, parts: _Parts, running_as: str, owner: str | None) -> TrialRecord:
    """Of a row of Optuna's table of trials, without its evaluations."""
    own, state = parts.attributes[row.trial_id], row.state
    if owner is not None:
        own.setdefault("worker", owner)
    not_stored = Outcome.FAILED if state == TrialState.FAIL else state.name.lower()
    outcome = own.pop("outcome", "") or not_stored
    if state == TrialState.RUNNING:
        outcome = running_as
    started, ended = _utc(row.datetime_start), _utc(row.datetime_complete)
    return TrialRecord(
        number=row.number,
        state=state.name,
        outcome=outcome,
        reason=own.pop("outcome_reason", ""),
        params=parts.params[row.trial_id],
        distributions=parts.distributions[row.trial_id],
        values=tuple(parts.values[row.trial_id]) if state == TrialState.COMPLETE else None,
        started=started,
        ended=ended,
        seconds=(ended - started).total_seconds() if started and ended else None,
        constraints=optuna_internals.constraints_of(parts.system_attrs[row.trial_id]),
        telemetry=own.pop("telemetry", {}),
        attributes=own,
    )


def _read_evaluations(connection: sa.Connection, name: str) -> dict[int, list[EvaluationRow]]:
    table = schema.evaluations
    query = sa.select(table).where(table.c.study == name).order_by(table.c.step)
    evaluations: dict[int, list[EvaluationRow]] = defaultdict(list)
    for row in connection.execute(query).mappings():
        fields = {name: row[name] for name in EvaluationRow.__dataclass_fields__}
        fields["metrics"] = json.loads(fields["metrics"])
        evaluations[row["trial_number"]].append(EvaluationRow(**fields))
    return evaluations


@lru_cache(maxsize=1024)
def _distribution(text: str) -> BaseDistribution:
    return json_to_distribution(text)


def _utc(time: datetime | None) -> datetime | None:
    return None if time is None else time.replace(tzinfo=UTC)  # Optuna 5 stores UTC without saying so
