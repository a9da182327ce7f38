"""The device time of a study that has a budget: the time spent, and whether another trial may begin.

A worker writes the time in which it has a trial into the row of its claim, with each heartbeat and each
evaluation. Workers that share a device each count their part. The sum over the rows is the time spent.

When all is spent, a trial stops at its next evaluation with a checkpoint. No trial begins that, with the
trials that have begun, would need more than is left.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from optuna.trial import FrozenTrial

from hpo.config.budget import BudgetConfig
from hpo.study.sampling.promotion import Promotion, is_paused
from hpo.study.store.schema import claims, studies

BUDGET_SPENT = "the study has spent its budget."


class DeviceClock:
    """The device time of one trial. `before`: seconds of its earlier workers."""

    def __init__(self, before: float) -> None:
        self.num_sharing = 1
        """Workers on the device, this one included."""
        self._num_devices = int(os.environ.get("WORLD_SIZE", "1"))  # of torchrun
        self._seconds = before
        self._last = time.monotonic()
        self._lock = threading.Lock()

    def seconds(self) -> float:
        """Return the device-seconds so far."""
        with self._lock:  # the heartbeat's thread calls it too
            now = time.monotonic()
            self._seconds += (now - self._last) * self._num_devices / self.num_sharing
            self._last = now
            return self._seconds


@dataclass(frozen=True)
class StudyBudget:
    """The budget of a study, as its definition in the database says now."""

    study: str
    promotion: Promotion | None = None

    def seconds(self, connection: sa.Connection) -> float:
        """Return the device-seconds of the budget; infinite if the study has no budget any more."""
        query = sa.select(studies.c.definition).where(studies.c.name == self.study)
        definition = json.loads(connection.execute(query).scalar() or "{}")
        given = definition.get("budget")
        return math.inf if given is None else BudgetConfig.model_validate(given).seconds

    def spent(self, connection: sa.Connection) -> dict[int, float]:
        """Return the device-seconds of each trial over all workers, by the trial's number."""
        query = sa.select(claims.c.trial_number, claims.c.device_seconds).where(claims.c.study == self.study)
        return {row.trial_number: row.device_seconds for row in connection.execute(query)}

    def is_spent(self, connection: sa.Connection) -> bool:
        """Whether nothing is left."""
        total = sa.select(sa.func.sum(claims.c.device_seconds)).where(claims.c.study == self.study)
        return (connection.execute(total).scalar() or 0.0) >= self.seconds(connection)

    def may_begin(
        self, connection: sa.Connection, trials: Sequence[FrozenTrial], whole_trials_left: float
    ) -> bool:
        """Whether enough is left for another trial and for what the trials that have begun still need.

        Args:
            whole_trials_left: what all these need, in whole trials.
        """
        seconds_of = self.spent(connection)
        left = self.seconds(connection) - sum(seconds_of.values())
        # A trial that ended before it trained says nothing about the length of a trial.
        rested = [trial for trial in trials if trial.state.is_finished() or is_paused(trial)]
        trained = [trial for trial in rested if trial.intermediate_values or trial.values]
        num_done = sum(map(self._done, trained))
        if not num_done:
            return left > 0
        of_whole_trial = sum(seconds_of.get(trial.number, 0.0) for trial in trained) / num_done
        return left > 0 and whole_trials_left * of_whole_trial <= left

    def _done(self, trial: FrozenTrial) -> float:
        """The share of its budget that a trial has trained."""
        if self.promotion is None:
            return 1.0
        outcome = trial.user_attrs.get("outcome", "failed" if trial.state.is_finished() else "paused")
        return self.promotion.trained(trial.user_attrs, outcome)
