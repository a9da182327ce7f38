"""The right of one worker to run one trial, and the changes of the trial that need this right.

Each change is one transaction, which first locks the claim's row. A killed worker leaves either the state
before or after a change.
"""

import json
import math
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import optuna
import sqlalchemy as sa
from optuna.pruners import NopPruner
from optuna.trial import FrozenTrial, TrialState

from hpo.config.limits import FEASIBLE
from hpo.errors import LeaseLostError
from hpo.json_safe import json_safe
from hpo.outcome import Outcome, Progress, TrialResult
from hpo.study.claims.budget import DeviceClock, StudyBudget
from hpo.study.sampling.promotion import PAUSED_ATTR, RUNGS_ATTR, Promotion
from hpo.study.store.optuna_internals import (
    end_trial,
    lock_trials,
    make_trial,
    set_intermediate_value,
    set_trial_attributes,
    study_id_of,
    trial_id_of,
)
from hpo.study.store.schema import EvaluationRow, claims, evaluations
from hpo.study.store.storage import Storage, is_stored

MAX_DEATHS = 3
"""A trial ends as `crashed` after this many deaths of its workers in a row, without progress in between."""


def trial_attributes(result: TrialResult) -> dict[str, Any]:
    """Return the user attributes of an ended trial: scalars, and the telemetry as one document."""
    attributes = {
        "outcome": result.outcome,
        "outcome_reason": result.reason,
        **result.headline,
        "telemetry": result.telemetry,
        **({"traceback": result.traceback} if result.traceback else {}),
    }
    return {name: json_safe(value) for name, value in attributes.items()}


@dataclass(eq=False)
class Lease:
    """The right of one worker to run one trial."""

    storage: Storage
    study: str
    token: str  # token of the study; a later study of the same name has another
    owner: str  # id of the worker
    trial: optuna.trial.Trial
    row: sa.Row[Any]  # row of the claim at its begin
    lost: threading.Event = field(default_factory=threading.Event)  # set if another worker has the trial
    study_closed: threading.Event = field(default_factory=threading.Event)
    """Set if the study was paused, cancelled or deleted. The trial must stop, and may continue later."""
    promotion: Promotion | None = None  # rule for pauses; None: the trial does not pause
    budget: StudyBudget | None = None
    host: str = field(default_factory=socket.gethostname)  # machine of the worker
    shares_checkpoints: bool = True  # true if all machines write their checkpoints to one folder or bucket
    progress: Progress | None = None
    """Progress of the trial; the next heartbeat writes it into the worker's row."""

    def __post_init__(self) -> None:
        is_here = self.shares_checkpoints or self.row.host in (None, self.host)
        self.saved_step: int = self.row.saved_step if is_here else 0
        """Step of the newest checkpoint available to this machine; 0: none."""
        self._saved_before = self.saved_step
        self._rung: float | None = None  # rung of a pause under this lease
        self._rungs: dict[str, Any] = {}
        self._started = time.monotonic()
        self.clock = DeviceClock(self.row.device_seconds)

    @property
    def number(self) -> int:
        return int(self.row.trial_number)

    @property
    def crash(self) -> str:
        """Reason to end the trial as `crashed`; empty: none."""
        if self.row.deaths < MAX_DEATHS:
            return ""
        step = self.row.death_step
        where = f"after step {step}" if step else "before its first checkpoint"
        return f"its process died {self.row.deaths} times {where}, without progress."

    @property
    def active_seconds(self) -> float:
        return float(self.row.active_seconds + time.monotonic() - self._started)

    def check(self) -> None:
        """Raise LeaseLostError if another worker has the trial. This reads a flag only."""
        if self.lost.is_set():
            raise LeaseLostError(f"Another worker has taken over trial {self.number}.")

    def update(self, connection: sa.Connection, **values: Any) -> bool:
        """Change and lock the claim's row until the end of the transaction; return false if it is lost."""
        if self.saved_step != self._saved_before:
            values = {"saved_step": self.saved_step, "host": self.host, **values}
        times = {"active_seconds": self.active_seconds, "device_seconds": self.clock.seconds()}
        change = sa.update(claims).where(
            claims.c.study == self.study,
            claims.c.trial_number == self.number,
            claims.c.owner == self.owner,
            is_stored(self.study, self.token),
        )
        return bool(connection.execute(change.values({**times, **values})).rowcount)

    def hold(self, connection: sa.Connection, **values: Any) -> None:
        """Like `update`, but raise LeaseLostError if the claim is lost."""
        if not self.update(connection, **values):
            self.lost.set()
            self.check()

    def is_budget_spent(self) -> bool:
        return self.budget is not None and self.storage.read(self.budget.is_spent)

    def store_params(self) -> None:
        """Make sure that the database has the suggested parameters of the trial.

        Optuna keeps an already stored parameter, such as one of a worker without its lease. A server in an
        older state, after a failover, lacks some. Raises LeaseLostError if the stored parameters differ.
        """
        self.storage.persist(self._store_params)

    def _store_params(self) -> None:
        with self.storage.engine.begin() as connection:
            self.hold(connection)
        trial = self.trial
        stored, params = self._stored().params, trial.params
        for name, distribution in trial.distributions.items():
            if name not in stored:
                value = distribution.to_internal_repr(params[name])
                self.storage.optuna.set_trial_param(trial_id_of(trial), name, value, distribution)
            elif stored[name] != params[name]:
                raise LeaseLostError(f"The database has another `{name}` of trial {self.number}.")

    def _stored(self) -> FrozenTrial:
        try:
            return self.storage.optuna.get_trial(trial_id_of(self.trial))
        except KeyError as error:
            raise LeaseLostError(f"Trial {self.number} is gone: its study was deleted.") from error

    def report(self, evaluation: EvaluationRow, index: int, value: float | None) -> bool:
        """Store one evaluation and return true if the pruner would stop the trial. Raises LeaseLostError.

        Evaluations of this and later steps are of a dead worker and are deleted. `index` counts the
        evaluations. It is Optuna's `step`, so that pruners compare trials of different batch sizes at the
        same share of their budget.
        """
        return self.storage.persist(lambda: self._report(evaluation, index, value))

    def _report(self, evaluation: EvaluationRow, index: int, value: float | None) -> bool:
        row = json_safe(asdict(evaluation))
        key = {"study": self.study, "trial_number": self.number}
        of_trial = [evaluations.c[column] == value for column, value in key.items()]
        study, trial_id = self.trial.study, trial_id_of(self.trial)
        with self.storage.engine.begin() as connection:
            self.hold(connection)
            connection.execute(sa.delete(evaluations).where(*of_trial, evaluations.c.step >= row["step"]))
            values = {**row, **key, "metrics": json.dumps(row["metrics"])}
            connection.execute(sa.insert(evaluations).values(values))
            if len(study.directions) == 1 and value is not None and math.isfinite(value):
                set_intermediate_value(connection, trial_id, index, value)
        if isinstance(study.pruner, NopPruner):  # always with several objectives
            return False
        # Not `trial.should_prune`, which reads an older copy of the trial.
        return study.pruner.prune(study, self.storage.optuna.get_trial(trial_id))

    def pause(self, rung: float, values: Sequence[float]) -> None:
        """Note that the trial is at a rung. The worker keeps it until its checkpoint is written."""
        stored = self.storage.persist(self._stored)
        self._rung, self._rungs = rung, {**stored.user_attrs.get(RUNGS_ATTR, {})}
        self._note_rung({"values": json_safe(list(values)), "constraints": {}})

    def _note_rung(self, at: Mapping[str, Any], **values: Any) -> None:
        rung, self._rungs = self._rung, {**self._rungs, str(self._rung): at}

        def write(connection: sa.Connection) -> None:
            self.hold(connection, paused_at=rung, **values)
            attributes = {PAUSED_ATTR: rung, RUNGS_ATTR: self._rungs, **self._work()}
            set_trial_attributes(connection, trial_id_of(self.trial), attributes)

        self.storage.write(write)

    def _work(self) -> dict[str, Any]:
        return {"worker": self.owner, "active_seconds": round(self.active_seconds, 3)}

    def release(self, result: TrialResult | None = None) -> None:
        """Release the trial for another worker. With `result`, the trial has paused."""
        if result is not None and self._rung is not None:
            at = {**self._rungs[str(self._rung)], "constraints": json_safe(result.constraints)}
            at |= {"is_constant": self._is_constant(at["values"], result.telemetry.get("baseline", {}))}
            self._note_rung(at, owner=None, facts=json.dumps(trial_attributes(result)))
        else:
            self.storage.write(lambda connection: self.hold(connection, owner=None))

    def _is_constant(self, values: Sequence[float], baseline: Mapping[str, float]) -> bool:
        trios = zip(self.trial.study.metric_names or (), values, self.trial.study.directions, strict=False)
        pairs = [(value - baseline[name], way.name) for name, value, way in trios if name in baseline]
        return bool(pairs) and not any((more if way == "MAXIMIZE" else -more) > 1e-9 for more, way in pairs)

    def end(self, result: TrialResult, retry: Mapping[str, Any] | None = None) -> None:
        """End the trial. `retry`: user attributes of a trial that tries the same again. Raises
        LeaseLostError.
        """
        self.storage.persist(lambda: self._end(result, retry))

    def _end(self, result: TrialResult, retry: Mapping[str, Any] | None) -> None:
        state, stored = TrialState[result.outcome.optuna_state], self._stored()
        if stored.state == state and stored.user_attrs.get("outcome") == result.outcome:
            return  # an earlier attempt succeeded, and its answer was lost
        if stored.state != TrialState.RUNNING:
            raise LeaseLostError(f"Trial {self.number} was ended by somebody else.")
        self._store_params()  # again: the server may have lost some
        infeasible = {FEASIBLE: 1.0} if result.outcome.infeasible else {}
        values = result.values if result.outcome == Outcome.COMPLETE else ()
        if result.outcome == Outcome.PRUNED and stored.last_step is not None:
            values = (stored.intermediate_values[stored.last_step],)  # Optuna's rule
        study_id = study_id_of(self.trial.study)
        with self.storage.engine.begin() as connection:
            if retry is not None:
                lock_trials(connection, study_id)
            self.hold(connection, owner=None, paused_at=None, counts=retry is None)
            is_ended = end_trial(
                connection,
                trial_id_of(self.trial),
                state,
                values=values or (),
                user_attrs=self._work() | trial_attributes(result),
                constraints={**result.constraints, **infeasible},
            )
            if not is_ended:
                raise LeaseLostError(f"Trial {self.number} was ended by somebody else.")
            if retry is not None:
                fixed = {**stored.system_attrs.get("fixed_params", {}), **stored.params}
                number = make_trial(connection, study_id, fixed_params=fixed, user_attrs=retry, waiting=True)
                point = {"study": self.study, "trial_number": number, "point": self.row.point}
                connection.execute(sa.insert(claims).values(point))
