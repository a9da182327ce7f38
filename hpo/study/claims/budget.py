"""The device time of a study that has a budget: what was spent, and whether another trial may begin.

A worker writes the time in which it has a trial into the row of its claim, with each heartbeat and each
evaluation. Workers that share a device each count their part. The sum over the rows is what was spent.

A trial ends at the first evaluation at which all is spent. No trial begins that, with those that have begun,
would need more than is left.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState

from hpo.config.budget import BudgetConfig
from hpo.study.sampling.promotion import RESUMED_ATTR, Promotion
from hpo.study.store.schema import spent, studies


class DeviceClock:
    """The device time of one claim."""

    def __init__(self) -> None:
        self.num_sharing = 1
        """Workers on the device, this one included."""
        self._id = uuid.uuid4().hex
        self._num_devices = int(os.environ.get("WORLD_SIZE", "1"))  # of torchrun
        self._seconds = 0.0
        self._last = time.monotonic()
        self._lock = threading.Lock()

    def store(self, connection: sa.Connection, study: str, trial_number: int) -> None:
        """Write the seconds so far into the row of the claim."""
        with self._lock:  # the heartbeat's thread does it too
            now = time.monotonic()
            self._seconds += (now - self._last) * self._num_devices / self.num_sharing
            self._last, seconds = now, self._seconds
        values = {"trial_number": trial_number, "seconds": seconds}
        if not connection.execute(sa.update(spent).where(spent.c.id == self._id).values(values)).rowcount:
            connection.execute(sa.insert(spent).values(id=self._id, study=study, **values))


@dataclass(frozen=True)
class StudyBudget:
    """What a study may spend, as its definition in the database says now."""

    study: str
    promotion: Promotion | None = None

    def seconds(self, connection: sa.Connection) -> float:
        """Of device time; infinite where the study has no budget any more."""
        query = sa.select(studies.c.definition).where(studies.c.name == self.study)
        definition = json.loads(connection.execute(query).scalar() or "{}")
        given = definition.get("budget")
        return math.inf if given is None else BudgetConfig.model_validate(given).seconds

    def spent(self, connection: sa.Connection) -> dict[int, float]:
        """Seconds of device time over all workers, by the trial's number."""
        seconds = sa.func.sum(spent.c.seconds).label("seconds")
        query = sa.select(spent.c.trial_number, seconds).where(spent.c.study == self.study)
        return {
            row.trial_number: row.seconds for row in connection.execute(query.group_by(spent.c.trial_number))
        }

    def is_spent(self, connection: sa.Connection) -> bool:
        """Whether nothing is left."""
        return sum(self.spent(connection).values()) >= self.seconds(connection)

    def may_begin(
        self, connection: sa.Connection, trials: Sequence[FrozenTrial], unfinished: Collection[int | None]
    ) -> bool:
        """Whether enough is left for another trial and for what those that have begun still need.

        Args:
            unfinished: the numbers of the trials that unfinished slots have.
        """
        seconds_of = self.spent(connection)
        left = self.seconds(connection) - sum(seconds_of.values())
        running = [trial for trial in trials if trial.state == TrialState.RUNNING]
        # Those that ended before they trained say nothing of what a trial takes.
        ended = (trial for trial in trials if trial.state.is_finished())
        trained = [trial for trial in ended if trial.intermediate_values or trial.values]
        if self.promotion is None:
            num_done, num_needed = float(len(trained)), len(running) + 1.0
        else:
            num_done = self.promotion.done(trial.user_attrs.get(RESUMED_ATTR, 0.0) for trial in trained)
            num_needed = self.promotion.left(trials, unfinished, num_new=1)
        if not num_done:
            return left > 0
        of_whole_trial = sum(seconds_of.get(trial.number, 0.0) for trial in trained) / num_done
        of_running = sum(seconds_of.get(trial.number, 0.0) for trial in running)
        return left > 0 and num_needed * of_whole_trial - of_running <= left
