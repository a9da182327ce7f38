"""Device time of a study with a budget: the time spent, and the trials that may still begin.

With each heartbeat and each evaluation, a worker writes the time of its trial into the row of its claim.
Workers on one device each count their part. When the sum has reached the budget, a trial stops at its next
evaluation with a checkpoint. It is PRUNED with the reason `BUDGET_SPENT`, and continues if the budget is
raised. The planner (`hpo.study.sampling.forecast`) decides if another trial begins.
"""

import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState

from hpo.config.sections import BudgetConfig
from hpo.study.sampling.forecast import (
    Cost,
    Forecast,
    Measured,
    forecast,
    measured_cost,
    measured_trial,
    seconds_ahead,
    training_share,
)
from hpo.study.sampling.promotion import Promotion, Rung, is_paused, rungs_of
from hpo.study.store.schema import claims, evaluations, studies


class DeviceClock:
    """The device time of one trial, after `before` seconds with earlier workers."""

    def __init__(self, before: float) -> None:
        self.num_sharing = 1  # number of workers on the device, with this one
        self._num_devices = int(os.environ.get("WORLD_SIZE", "1"))  # of torchrun
        self._seconds = before
        self._last = time.monotonic()
        self._lock = threading.Lock()

    def seconds(self) -> float:
        with self._lock:  # the thread of heartbeats calls it too
            now = time.monotonic()
            self._seconds += (now - self._last) * self._num_devices / self.num_sharing
            self._last = now
            return self._seconds


@dataclass(eq=False)
class StudyBudget:
    """The budget of a study in its stored definition, and the device time of its trials."""

    study: str
    promotion: Promotion | None = None

    def __post_init__(self) -> None:
        self._measured: dict[int, Measured] = {}  # ended trials, by number
        self._ended: list[FrozenTrial] = []  # ended trials before their measurement

    def add_ended(self, trial: FrozenTrial) -> None:
        self._ended.append(trial)

    def seconds(self, connection: sa.Connection) -> float:
        """Return the device-seconds of the budget; infinite without a budget."""
        query = sa.select(studies.c.definition).where(studies.c.name == self.study)
        definition = json.loads(connection.execute(query).scalar() or "{}")
        budget = definition.get("budget")
        return math.inf if budget is None else BudgetConfig.model_validate(budget).seconds

    def left(self, connection: sa.Connection) -> float:
        """Return the unspent device-seconds, over all workers."""
        total = sa.select(sa.func.sum(claims.c.device_seconds)).where(claims.c.study == self.study)
        return self.seconds(connection) - (connection.execute(total).scalar() or 0.0)

    def is_spent(self, connection: sa.Connection) -> bool:
        return self.left(connection) <= 0

    def forecast(
        self,
        connection: sa.Connection,
        rungs: Sequence[Rung],
        begun: Sequence[FrozenTrial],
        num_waiting: int,
        most: int,
    ) -> Forecast:
        """Forecast the rest of the study, with at most `most` new trials. `begun` are unfinished trials."""
        cost = self._cost(connection, [trial for trial in begun if is_paused(trial)])
        left = self.left(connection)
        if cost is not None:
            running = [trial for trial in begun if not is_paused(trial)]
            rows = self._rows(connection, running)
            parts = ((trial.user_attrs, rows.get(trial.number, _NO_SECONDS)[0]) for trial in running)
            left += sum(seconds_ahead(self.promotion, cost, *part) for part in parts)
        num_starts = sum(not rungs_of(trial.user_attrs) for trial in begun) + num_waiting
        return forecast(self.promotion, rungs, num_starts, most, cost, None if left == math.inf else left)

    def _cost(self, connection: sa.Connection, paused: Sequence[FrozenTrial]) -> Cost | None:
        for trial, measured in self._measure(connection, self._ended):
            self._measured[trial.number] = measured
        self._ended = []
        now = [measured for _, measured in self._measure(connection, paused)]
        return measured_cost([*self._measured.values(), *now])

    def _measure(
        self, connection: sa.Connection, trials: Sequence[FrozenTrial]
    ) -> Iterator[tuple[FrozenTrial, Measured]]:
        trained = [trial for trial in trials if trial.intermediate_values or trial.values or is_paused(trial)]
        rows = self._rows(connection, trained)
        for trial in trained:
            is_complete, row = trial.state == TrialState.COMPLETE, rows.get(trial.number, _NO_SECONDS)
            if measured := measured_trial(self.promotion, trial.user_attrs, is_complete, row):
                yield trial, measured

    def _rows(
        self, connection: sa.Connection, trials: Sequence[FrozenTrial]
    ) -> Mapping[int, tuple[float, float]]:
        """Return the device-seconds of trials, in all and in training, by the trial's number."""
        if not trials:
            return {}
        numbers = [trial.number for trial in trials]
        last = sa.select(sa.func.max(evaluations.c.seconds)).where(
            evaluations.c.study == claims.c.study, evaluations.c.trial_number == claims.c.trial_number
        )
        columns = (claims.c.trial_number, claims.c.device_seconds, claims.c.active_seconds)
        few = len(numbers) < 1000  # values that a statement of any database can hold
        these = claims.c.trial_number.in_(numbers) if few else claims.c.trial_number <= max(numbers)
        query = sa.select(*columns, last.scalar_subquery().label("trained"))
        query = query.where(claims.c.study == self.study, these)
        return {
            row.trial_number: (
                row.device_seconds,
                row.device_seconds * training_share(row.trained, row.active_seconds),
            )
            for row in connection.execute(query)
        }


_NO_SECONDS = (0.0, 0.0)
