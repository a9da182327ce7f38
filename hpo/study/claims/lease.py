"""The right of one worker to run the trial of one slot, and what may be stored under it."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import optuna
import sqlalchemy as sa
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from hpo.config.limits import FEASIBLE
from hpo.errors import LeaseLostError
from hpo.json_safe import json_safe
from hpo.outcome import Outcome
from hpo.study.claims.budget import DeviceClock, StudyBudget
from hpo.study.sampling.promotion import ORIGIN_ATTR, VALUES_ATTR
from hpo.study.store.optuna_internals import trial_id_of
from hpo.study.store.schema import NO_PROGRESS, evaluations, slots
from hpo.study.store.storage import Storage

if TYPE_CHECKING:
    from hpo.study.reading.study_record import EvaluationRow
    from hpo.trial.telemetry import Progress, TrialResult

MAX_DEATHS = 3
"""So many workers of a trial that died in a row, without progress in between, end it as `crashed`."""
BUDGET_SPENT = "the study has spent its budget."


def trial_attributes(result: TrialResult) -> dict[str, Any]:
    """The user attributes of a trial that ended as `result`: scalars, and the telemetry as one document."""
    return {
        "outcome": result.outcome,
        "outcome_reason": result.reason,
        **result.headline,
        "telemetry": result.telemetry,
        **({"traceback": result.traceback} if result.traceback else {}),
    }


@dataclass(eq=False)
class Lease:
    """The right of one worker to run one slot's trial."""

    storage: Storage
    study: str
    owner: str
    slot: int
    trial_number: int | None = None
    """Of the slot's last Optuna trial."""
    trial: optuna.trial.Trial | None = None
    saved_step: int = 0
    """Of the newest checkpoint that was written of its trial."""
    deaths: int = 0
    death_step: int = 0
    """From where it would go on after the last of them."""
    lost: threading.Event = field(default_factory=threading.Event)
    """Set when another worker has the slot."""
    study_closed: threading.Event = field(default_factory=threading.Event)
    """Set when the study was paused, cancelled or deleted: its trial is to stop and go on later."""
    budget: StudyBudget | None = None
    clock: DeviceClock = field(default_factory=DeviceClock)
    progress: Progress | None = None
    """How far its trial is; the next heartbeat writes it into the worker's row."""

    @property
    def crash(self) -> str:
        """Why its trial is to end as `crashed`; empty: it is not."""
        if self.deaths < MAX_DEATHS:
            return ""
        where = f"after step {self.death_step}" if self.death_step else "before its first checkpoint"
        return f"its process died {self.deaths} times {where}, without progress."

    def check(self) -> None:
        """Raise LeaseLostError if another worker has the slot. Called between steps; it reads a flag only."""
        if self.lost.is_set():
            raise LeaseLostError(f"Another worker has taken over slot {self.slot}.")

    def update(self, connection: sa.Connection, *conditions: sa.ColumnElement[bool], **values: Any) -> bool:
        """Change the slot's row, which stays locked until the end of the transaction; False: another worker
        has it, or one of the `conditions` does not hold."""
        owned = (slots.c.study == self.study, slots.c.slot == self.slot, slots.c.owner == self.owner)
        saved = {"saved_step": self.saved_step} if self.saved_step else {}
        change = sa.update(slots).where(*owned, *conditions).values({"owner": self.owner, **saved, **values})
        if not connection.execute(change).rowcount:
            return False
        if self.budget is not None and self.trial_number is not None:
            self.clock.store(connection, self.study, self.trial_number)
        return True

    def is_budget_spent(self) -> bool:
        """Whether the trial is to end because the study has spent what it may."""
        return self.budget is not None and self.storage.read(self.budget.is_spent)

    def hold(self, connection: sa.Connection, *conditions: sa.ColumnElement[bool], **values: Any) -> None:
        """Call `update`; raise LeaseLostError if another worker has the slot."""
        if not self.update(connection, *conditions, **values):
            self.lost.set()
            self.check()

    def store_params(self) -> None:
        """Make sure that the database has the parameters that were suggested to the trial.

        Optuna keeps a parameter that is already stored, such as one of a worker that had lost the slot. A
        server that fell back to an older state lacks some. Raises LeaseLostError if the stored parameters
        differ, or another worker has the slot: then the trial is to be opened again.
        """
        self.storage.persist(self._store_params)

    def _store_params(self) -> None:
        assert self.trial is not None
        with self.storage.engine.begin() as connection:
            self.hold(connection)
        stored, params = self._stored(self.trial).params, self.trial.params
        for name, distribution in self.trial.distributions.items():
            if name not in stored:
                value = distribution.to_internal_repr(params[name])
                self.storage.optuna.set_trial_param(trial_id_of(self.trial), name, value, distribution)
            elif stored[name] != params[name]:
                raise LeaseLostError(f"The database has another `{name}` of trial {self.trial.number}.")

    def _stored(self, trial: optuna.trial.Trial) -> FrozenTrial:
        try:
            return self.storage.optuna.get_trial(trial_id_of(trial))
        except KeyError as error:
            raise LeaseLostError(f"Trial {trial.number} is gone: its study was deleted.") from error

    def report(
        self, trial: optuna.trial.Trial, evaluation: EvaluationRow, index: int, value: float | None
    ) -> bool:
        """Store one evaluation of the trial and return whether the pruner would stop it.

        Evaluations of this step and later ones are deleted: a worker that died made them after the checkpoint
        from which the trial went on. Raises LeaseLostError, and stores nothing, if another worker has the
        trial.

        Args:
            index: counts the trial's evaluations; it is Optuna's `step`, so that pruners compare trials of
                different batch sizes at the same share of their budget.
            value: the objective; Optuna gets it if it is finite and the only objective.
        """
        return self.storage.persist(lambda: self._report(trial, evaluation, index, value))

    def _report(
        self, trial: optuna.trial.Trial, evaluation: EvaluationRow, index: int, value: float | None
    ) -> bool:
        row = json_safe(asdict(evaluation))
        key = {"study": self.study, "trial_number": trial.number}
        of_trial = [evaluations.c[column] == value for column, value in key.items()]
        with self.storage.engine.begin() as connection:
            self.hold(connection)
            connection.execute(sa.delete(evaluations).where(*of_trial, evaluations.c.step >= row["step"]))
            values = {**row, **key, "metrics": json.dumps(row["metrics"])}
            connection.execute(sa.insert(evaluations).values(values))
        study, trial_id, optunas = trial.study, trial_id_of(trial), self.storage.optuna
        if len(study.directions) > 1:
            return False
        if value is not None and math.isfinite(value):
            optunas.set_trial_intermediate_value(trial_id, index, value)
        # Not `trial.report`, which keeps an older value of the same step, as of before a checkpoint.
        return study.pruner.prune(study, optunas.get_trial(trial_id))

    def record(self, result: TrialResult, slot_state: str) -> None:
        """Store how the trial ended, then the state of its slot; killed in between, the next claim does that.

        Raises LeaseLostError if another worker has the slot, or somebody else has ended the trial.
        """
        assert self.trial is not None
        mine = slots.c.trial_number == self.trial.number
        with self.storage.engine.begin() as connection:
            self.hold(connection, mine)
        try:
            self._end_trial(self.trial, result)
        except UpdateFinishedTrialError as error:
            raise LeaseLostError(f"Trial {self.trial.number} was ended by somebody else.") from error
        is_begun_anew = slot_state == "open" and ORIGIN_ATTR not in self.trial.user_attrs
        fresh = NO_PROGRESS if is_begun_anew else {}
        with self.storage.engine.begin() as connection:
            self.hold(connection, mine, state=slot_state, **fresh)

    def _end_trial(self, trial: optuna.trial.Trial, result: TrialResult) -> None:
        state, stored = TrialState[result.outcome.optuna_state], self._stored(trial)
        if stored.state == state and stored.user_attrs.get("outcome") == result.outcome:
            return  # the answer was lost
        if stored.state == TrialState.RUNNING:
            self._store_params()  # again: see there
        for key, value in trial_attributes(result).items():
            trial.set_user_attr(key, json_safe(value))
        infeasible = {FEASIBLE: 1.0} if result.outcome.infeasible else {}
        for name, value in {**result.constraints, **infeasible}.items():
            if name not in stored.constraints:
                trial.set_constraint(name, value)
        values = result.values if result.outcome == Outcome.COMPLETE else None
        if result.outcome == Outcome.PRUNED:
            values = stored.user_attrs.get(VALUES_ATTR)
            if stored.last_step is not None:
                values = (stored.intermediate_values[stored.last_step],)  # as Optuna does
        self.storage.optuna.set_trial_state_values(trial_id_of(trial), state, values)
