"""Read a whole study for status, reports and the dashboard.

Optuna runs queries for every attribute of a trial, which takes seconds for thousands of trials. This module
runs one query for each table.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Any

import sqlalchemy as sa
from optuna.distributions import json_to_distribution

from hpo.collector import collector_paused
from hpo.config.study_file import check_study_name
from hpo.outcome import Outcome
from hpo.study.reading.detailed_evaluations import read_detailed_evaluations
from hpo.study.reading.study_record import StudyRecord, TrialRecord, WorkerRecord
from hpo.study.sampling.promotion import RUN_ATTRS
from hpo.study.store import optuna_internals, schema
from hpo.study.store.database import snapshot
from hpo.study.store.failures import decoded, definition_of, json_object
from hpo.study.store.foreign import is_foreign
from hpo.study.store.optuna_internals import CONSTRAINT, ENDED_OUTSIDE
from hpo.study.store.schema import EvaluationRow
from hpo.study.store.storage import COMPARISON_ATTR, Storage, count_trials

_TELEMETRY = "telemetry"
_FIELDS = ("outcome", "outcome_reason", _TELEMETRY)
_BEFORE_A_RUN = {*RUN_ATTRS} - {"retry_of"}
"""A waiting trial has none of these, unless somebody enqueued it with the attributes of another."""


def read_study(storage: Storage, name: str) -> StudyRecord:
    """Read everything stored about the study `name`. Raises StorageError if there is none."""
    check_study_name(name)  # it also names the folder of its report
    storage.check_study(name)

    def read() -> StudyRecord:
        # A snapshot: a trial that ends meanwhile would be read in halves.
        with collector_paused(), snapshot(storage.engine) as connection:
            return _read(storage, connection, name)

    return storage.persist(read)


def _read(storage: Storage, connection: sa.Connection, name: str) -> StudyRecord:
    ours, optunas = schema.studies, optuna_internals.studies
    of_study = sa.select(ours, optunas.c.study_id).join(optunas, optunas.c.study_name == ours.c.name)
    study = connection.execute(of_study.where(ours.c.name == name)).one()
    definition = definition_of(name, study.definition)
    claims = connection.execute(sa.select(schema.claims).where(schema.claims.c.study == name)).all()
    running = {claim.owner: claim.trial_number for claim in claims if claim.owner is not None}
    members = sa.select(schema.workers, storage.now.label("now")).where(schema.workers.c.study == name)
    heard = storage.heard_workers(connection, schema.workers.c.study == name)
    workers = [
        WorkerRecord(
            id=row.id,
            host=row.host,
            pid=row.pid,
            started=datetime.fromtimestamp(row.started, UTC),
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
    trials = _read_trials(connection, study.study_id, name, state_of)
    foreign = _count_foreign(connection, study.study_id, name)
    counts = count_trials(connection, ours.c.name == name, alive=alive)[name]
    return StudyRecord(
        name=name,
        metric_names=tuple(objective["metric"] for objective in definition["objective"]),
        directions=tuple(objective["direction"] for objective in definition["objective"]),
        definition=definition,
        trials=trials,
        workers=workers,
        counts=counts,
        state=study.state,
        spent={claim.trial_number: claim.device_seconds for claim in claims},
        num_foreign=foreign.total(),
        num_foreign_running=foreign["RUNNING"],
        comparisons=_read_comparisons(connection, study.study_id),
    )


def _state_of(claim: Any, alive: set[str]) -> tuple[str, str | None]:
    if claim.owner in alive:
        return "running", claim.owner
    return Outcome.PREEMPTED if claim.paused_at is None else Outcome.PAUSED, None


def _read_comparisons(connection: sa.Connection, study_id: int) -> dict[str, Any]:
    table = optuna_internals.study_user_attributes
    of_study = sa.select(table).where(table.c.study_id == study_id, table.c.key.startswith(COMPARISON_ATTR))
    rows = connection.execute(of_study)
    return {row.key.removeprefix(COMPARISON_ATTR): decoded(row.value_json, f"`{row.key}`") for row in rows}


def _count_foreign(connection: sa.Connection, study_id: int, name: str) -> Counter[str]:
    trials = optuna_internals.trials
    states = sa.select(trials.c.state).where(trials.c.study_id == study_id, is_foreign(name))
    return Counter(state.name for state in connection.execute(states).scalars())


def _read_trials(
    connection: sa.Connection, study_id: int, name: str, state_of: Mapping[int, tuple[str, str | None]]
) -> list[TrialRecord]:
    """Return all trials but foreign ones. `state_of`: outcome and worker of the RUNNING trials by number."""
    trials = optuna_internals.trials
    is_own = sa.and_(trials.c.study_id == study_id, ~is_foreign(name))

    def rows(table: sa.Table, order: str, *where: sa.ColumnElement[bool]) -> Iterable[sa.Row[Any]]:
        of_trial = table.c.trial_id.in_(sa.select(trials.c.trial_id).where(is_own))
        return connection.execute(sa.select(table).where(of_trial, *where).order_by(table.c[order]))

    own = connection.execute(sa.select(trials).where(is_own).order_by(trials.c.number)).all()
    numbers = {row.trial_id: row.number for row in own}
    values: dict[int, list[float]] = defaultdict(list)
    limits: dict[int, dict[str, float]] = defaultdict(dict)
    params: dict[int, dict[str, Any]] = defaultdict(dict)
    attributes: dict[int, dict[str, Any]] = defaultdict(dict)
    for row in rows(optuna_internals.table_of_values, "objective"):
        values[row.trial_id].append(row.value)
    table = optuna_internals.system_attributes
    for row in rows(table, "key", table.c.key.startswith(CONSTRAINT)):
        value = decoded(row.value_json, f"`{row.key}` of trial {numbers[row.trial_id]}")
        limits[row.trial_id][row.key.removeprefix(CONSTRAINT)] = value
    for row in rows(optuna_internals.params, "param_id"):
        shown = f"`{row.param_name}` of trial {numbers[row.trial_id]}"
        value = decoded(row.distribution_json, shown, partial(_param, stored=row.param_value))
        params[row.trial_id][row.param_name] = value
    for row in rows(optuna_internals.user_attributes, "trial_user_attribute_id"):
        shown = f"`{row.key}` of trial {numbers[row.trial_id]}"
        decode = json_object if row.key == _TELEMETRY else json.loads
        attributes[row.trial_id][row.key] = decoded(row.value_json, shown, decode)
    evaluations = _read_evaluations(connection, name)
    detailed = read_detailed_evaluations(connection, name)
    records = []
    for row in own:
        stored, state = attributes[row.trial_id], row.state.name
        running_as, owner = state_of.get(row.number, ("running", None))
        outcome, reason = _ending(state, running_as, stored)
        started, ended = _utc(row.datetime_start), _utc(row.datetime_complete)
        record = TrialRecord(
            number=row.number,
            state=state,
            outcome=outcome,
            reason=reason,
            params=params[row.trial_id],
            values=tuple(values[row.trial_id]) if outcome == Outcome.COMPLETE else None,
            started=started,
            ended=ended,
            seconds=(ended - started).total_seconds() if started and ended else None,
            attributes=_own(({"worker": owner} if owner else {}) | stored, state),
            # Without an outcome, somebody else wrote them.
            constraints=limits[row.trial_id] if ended and "outcome" in stored else {},
            telemetry={} if state == "WAITING" else stored.get(_TELEMETRY, {}),
            evaluations=evaluations[row.number],
            trained_seconds=max((one.seconds for one in evaluations[row.number]), default=None),
            detailed=detailed[row.number],
        )
        records.append(record)
    return records


def _read_evaluations(connection: sa.Connection, name: str) -> dict[int, list[EvaluationRow]]:
    table = schema.evaluations
    columns = [table.c[field] for field in EvaluationRow.__dataclass_fields__]
    query = sa.select(table.c.trial_number, *columns).where(table.c.study == name).order_by(table.c.step)
    evaluations: dict[int, list[EvaluationRow]] = defaultdict(list)
    for number, step, epoch, seconds, metrics, *rates in connection.execute(query):
        metrics = decoded(metrics, f"`metrics` of trial {number}", json_object)
        evaluations[number].append(EvaluationRow(step, epoch, seconds, metrics, *rates))
    return evaluations


def _ending(state: str, running_as: str, attributes: Mapping[str, Any]) -> tuple[str, str]:
    if state in ("RUNNING", "WAITING"):
        return running_as if state == "RUNNING" else "waiting", ""
    if "outcome" not in attributes:  # hpo stores it with the end
        return Outcome.FAILED, ENDED_OUTSIDE
    return attributes["outcome"], attributes.get("outcome_reason", "")


def _own(attributes: Mapping[str, Any], state: str) -> dict[str, Any]:
    left_out = _BEFORE_A_RUN if state == "WAITING" else _FIELDS
    return {key: value for key, value in attributes.items() if key not in left_out}


_distribution = lru_cache(maxsize=1024)(json_to_distribution)


def _param(distribution_json: str, stored: float) -> Any:
    return _distribution(distribution_json).to_external_repr(stored)


def _utc(time: datetime | None) -> datetime | None:
    return None if time is None else time.replace(tzinfo=UTC)  # Optuna 5 stores UTC without saying so
