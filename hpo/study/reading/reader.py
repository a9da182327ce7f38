"""Read a whole study for status, reports and the dashboard.

Optuna runs queries for every attribute of a trial, which takes seconds for thousands of trials. This module
runs one query for each table, and JSON is decoded at its first use.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from hpo.collector import collector_paused
from hpo.config.study_file import check_study_name
from hpo.outcome import Outcome
from hpo.study.reading.detailed_evaluations import read_detailed_evaluations
from hpo.study.reading.study_record import (
    CAUTIONS,
    NOT_READ,
    NotRead,
    StoredJson,
    StudyRecord,
    TrialRecord,
    WorkerRecord,
    best_trials,
)
from hpo.study.sampling.promotion import PAUSED_ATTR, RESUMED_ATTR, RUN_ATTRS, RUNGS_ATTR
from hpo.study.store import optuna_internals, schema
from hpo.study.store.database import snapshot
from hpo.study.store.foreign import is_foreign
from hpo.study.store.optuna_internals import ENDED_OUTSIDE, constraint
from hpo.study.store.schema import EvaluationRow
from hpo.study.store.storage import COMPARISON_ATTR, Storage

_TELEMETRY = "telemetry"
_FIELDS = ("outcome", "outcome_reason", _TELEMETRY)
_OUTLINE = ("outcome", "outcome_reason", "worker", "active_seconds", PAUSED_ATTR, RESUMED_ATTR, RUNGS_ATTR)
"""User attributes for counting and ranking trials."""
_BEFORE_A_RUN = {*RUN_ATTRS} - {"retry_of"}
"""A waiting trial has none of these, unless somebody enqueued it with the attributes of another."""
_ALL = sa.true()
_MAX_IDS = 10_000
"""Most ids in one query. SQLite takes 32,766 parameters, PostgreSQL 65,535."""


def read_study(storage: Storage, name: str, *, brief: bool = False) -> StudyRecord:
    """Read everything stored about the study `name`. Raises StorageError if there is none.

    With `brief`, read only the content of `hpo status` and `hpo best`: parameters, telemetry and detailed
    evaluations of the best trials and of trials with a caution. The other trials have `NOT_READ`.
    """
    check_study_name(name)  # it also names the folder of its report
    storage.check_study(name)

    def read() -> StudyRecord:
        # A snapshot: a trial that ends meanwhile would be read in halves.
        with collector_paused(), snapshot(storage.engine) as connection:
            return _read(storage, connection, name, brief)

    return storage.persist(read)


def _read(storage: Storage, connection: sa.Connection, name: str, brief: bool) -> StudyRecord:
    ours, optunas = schema.studies, optuna_internals.studies
    of_study = sa.select(ours, optunas.c.study_id).join(optunas, optunas.c.study_name == ours.c.name)
    study = connection.execute(of_study.where(ours.c.name == name)).one()
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
    reading = _Trials(connection, study.study_id, name)
    attributes = reading.attributes(names=_OUTLINE if brief else ())
    trials = reading.outlines(attributes, state_of)
    foreign = reading.foreign()
    counted = {claim.trial_number for claim in claims if claim.counts}
    counts = Counter({"open": 0, "running": 0, "done": 0})
    counts.update(_count_of(trial) for trial in trials.values() if trial.number in counted)
    counts["open"] += max(0, study.n_trials - counts.total())
    record = StudyRecord(
        name=name,
        metric_names=tuple(objective["metric"] for objective in definition["objective"]),
        directions=tuple(objective["direction"] for objective in definition["objective"]),
        definition=definition,
        trials=[*trials.values()],
        workers=workers,
        counts=dict(counts),
        state=study.state,
        spent={claim.trial_number: claim.device_seconds for claim in claims},
        num_foreign=foreign.total(),
        num_foreign_running=foreign["RUNNING"],
        comparisons=_read_comparisons(connection, study.study_id),
    )
    shown = trials
    if brief and definition.get("budget") is None:  # the use of a budget is in the telemetry of all trials
        best = {trial.number for trial in best_trials(record)}
        caution = reading.with_caution()
        shown = {key: trial for key, trial in trials.items() if trial.number in best or key in caution}
    if brief:
        attributes = reading.attributes(shown)
    trials |= reading.in_full(shown, attributes)
    if not brief:
        evaluations = reading.evaluations()
        trials = {key: replace(trial, evaluations=evaluations[trial.number]) for key, trial in trials.items()}
    return replace(record, trials=[*trials.values()])


def _state_of(claim: Any, alive: set[str]) -> tuple[str, str | None]:
    """Return the outcome of a RUNNING trial with this claim, and its worker."""
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


@dataclass(frozen=True)
class _Trials:
    """The trials of one study in the database, by Optuna's ids."""

    connection: sa.Connection
    study_id: int
    study: str

    @property
    def _is_own(self) -> sa.ColumnElement[bool]:
        """The condition for a trial of the study that is not foreign."""
        return sa.and_(optuna_internals.trials.c.study_id == self.study_id, ~is_foreign(self.study))

    def foreign(self) -> Counter[str]:
        """Count the foreign trials of the study by state."""
        trials = optuna_internals.trials
        of_study = (trials.c.study_id == self.study_id, is_foreign(self.study))
        states = self.connection.execute(sa.select(trials.c.state).where(*of_study)).scalars()
        return Counter(state.name for state in states)

    def outlines(
        self, attributes: Mapping[int, Mapping[str, Any]], state_of: Mapping[int, tuple[str, str | None]]
    ) -> dict[int, TrialRecord]:
        """Return every trial with the facts for counting and ranking; the rest is not read.

        `state_of`: outcome and worker of the RUNNING trials by number.
        """
        values: dict[int, list[float]] = defaultdict(list)
        constraints: dict[int, list[sa.Row[Any]]] = defaultdict(list)
        for row in self._rows(optuna_internals.table_of_values, "objective"):
            values[row.trial_id].append(row.value)
        table = optuna_internals.system_attributes
        for row in self._rows(table, "key", where=table.c.key.startswith("constraints")):
            constraints[row.trial_id].append(row)
        table = schema.evaluations
        columns = (table.c.trial_number, sa.func.count(), sa.func.max(table.c.seconds))
        evaluated = sa.select(*columns).where(table.c.study == self.study).group_by(table.c.trial_number)
        evaluations = {number: facts for number, *facts in self.connection.execute(evaluated)}
        trials = optuna_internals.trials
        query = sa.select(trials).where(self._is_own).order_by(trials.c.number)
        outlines = {}
        for row in self.connection.execute(query):
            stored, state = attributes.get(row.trial_id, {}), row.state.name
            running_as, owner = state_of.get(row.number, ("running", None))
            outcome, reason = _ending(state, running_as, stored)
            started, ended = _utc(row.datetime_start), _utc(row.datetime_complete)
            limits: dict[str, float] = {}
            if ended and "outcome" in stored:  # otherwise somebody else wrote them
                for one in constraints[row.trial_id]:
                    limits |= constraint(one.key, json.loads(one.value_json))
            num_evaluations, trained_seconds = evaluations.get(row.number, (0, None))
            outlines[row.trial_id] = TrialRecord(
                number=row.number,
                state=state,
                outcome=outcome,
                reason=reason,
                params=NOT_READ,
                values=tuple(values[row.trial_id]) if outcome == Outcome.COMPLETE else None,
                started=started,
                ended=ended,
                seconds=(ended - started).total_seconds() if started and ended else None,
                attributes=_own({"worker": owner, **stored} if owner else stored, state),
                constraints=limits,
                telemetry=NOT_READ,
                evaluations=NotRead(num_evaluations),
                trained_seconds=trained_seconds,
                detailed=NOT_READ,
            )
        return outlines

    def in_full(
        self, trials: Mapping[int, TrialRecord], attributes: defaultdict[int, dict[str, Any]]
    ) -> dict[int, TrialRecord]:
        """Return these trials with their parameters, telemetry and detailed evaluations."""
        params: dict[int, dict[str, Any]] = defaultdict(dict)
        for row in self._rows(optuna_internals.params, "param_id", trials):
            params[row.trial_id][row.param_name] = _external(row.distribution_json)(row.param_value)
        numbers = {trial.number for trial in trials.values()}
        detailed = read_detailed_evaluations(self.connection, self.study, numbers)
        return {
            trial_id: replace(
                trial,
                params=params[trial_id],
                telemetry={} if trial.state == "WAITING" else attributes[trial_id].get(_TELEMETRY, {}),
                attributes={**_own(attributes[trial_id], trial.state), **trial.attributes},
                detailed=detailed.get(trial.number, {}),
            )
            for trial_id, trial in trials.items()
        }

    def attributes(
        self, trial_ids: Collection[int] | None = None, names: Collection[str] = ()
    ) -> defaultdict[int, dict[str, Any]]:
        """Return the user attributes (with these `names`) of these trials, or of all."""
        attributes: defaultdict[int, dict[str, Any]] = defaultdict(dict)
        table = optuna_internals.user_attributes
        named = table.c.key.in_(names) if names else _ALL
        for row in self._rows(table, "trial_user_attribute_id", trial_ids, where=named):
            decode = StoredJson if row.key == _TELEMETRY else json.loads
            attributes[row.trial_id][row.key] = decode(row.value_json)
        return attributes

    def with_caution(self) -> set[int]:
        """Return the ids of the trials with a possible warning in their telemetry."""
        table = optuna_internals.user_attributes
        texts = sa.or_(*(table.c.value_json.contains(text) for text in CAUTIONS))
        rows = self._rows(table, "trial_id", where=sa.and_(table.c.key == _TELEMETRY, texts))
        return {row.trial_id for row in rows}

    def evaluations(self) -> dict[int, list[EvaluationRow]]:
        """Return the evaluations of all trials by number."""
        table = schema.evaluations
        names = EvaluationRow.__dataclass_fields__
        columns = [table.c[name] for name in names]
        query = sa.select(table.c.trial_number, *columns).where(table.c.study == self.study)
        evaluations: dict[int, list[EvaluationRow]] = defaultdict(list)
        rows = self.connection.execute(query.order_by(table.c.step))
        for number, step, epoch, seconds, metrics, *rates in rows:
            evaluations[number].append(EvaluationRow(step, epoch, seconds, StoredJson(metrics), *rates))
        return evaluations

    def _rows(
        self,
        table: sa.Table,
        order: str,
        trial_ids: Collection[int] | None = None,
        where: sa.ColumnElement[bool] = _ALL,
    ) -> Iterable[sa.Row[Any]]:
        trials = optuna_internals.trials
        in_study = sa.select(trials.c.trial_id).where(self._is_own)
        here: sa.ColumnElement[bool] = table.c.trial_id.in_(in_study)
        if trial_ids is not None and len(trial_ids) <= _MAX_IDS:
            here = here & table.c.trial_id.in_(list(trial_ids))
        return self.connection.execute(sa.select(table).where(here, where).order_by(table.c[order]))


def _ending(state: str, running_as: str, attributes: Mapping[str, Any]) -> tuple[str, str]:
    """Return the outcome of a trial and its reason."""
    if state in ("RUNNING", "WAITING"):
        return running_as if state == "RUNNING" else "waiting", ""
    if "outcome" not in attributes:  # hpo stores it with the end
        return Outcome.FAILED, ENDED_OUTSIDE
    return attributes["outcome"], attributes.get("outcome_reason", "")


def _own(attributes: Mapping[str, Any], state: str) -> dict[str, Any]:
    """Return the user attributes without a field of `TrialRecord` that a trial in this state may have."""
    left_out = _BEFORE_A_RUN if state == "WAITING" else _FIELDS
    return {key: value for key, value in attributes.items() if key not in left_out}


@lru_cache(maxsize=1024)
def _external(distribution_json: str) -> Callable[[float], Any]:
    """Return the function from Optuna's stored number to the value of a parameter."""
    distribution = json.loads(distribution_json)
    if (choices := distribution["attributes"].get("choices")) is not None:
        return lambda stored: choices[int(stored)]
    return int if distribution["name"].startswith("Int") else float


def _utc(time: datetime | None) -> datetime | None:
    return None if time is None else time.replace(tzinfo=UTC)  # Optuna 5 stores UTC without saying so
