"""Trials of a study at one moment for one worker: free, running, paused, waiting.

A worker's device may lack precisions of the study (`Runnable`). Optuna's trials are read before the claims,
on a connection of their own. A trial is claimed only if it is still unchanged.
"""

import json
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import optuna
import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState

from hpo.precision.table import PRECISION, named_choices
from hpo.study.claims.budget import StudyBudget
from hpo.study.sampling.device_sampler import known_params
from hpo.study.sampling.feasible_sampler import Choice, Failures, choices_of
from hpo.study.sampling.points import Point, unused_points
from hpo.study.sampling.promotion import (
    PAUSED_ATTR,
    Promotion,
    Rung,
    Standings,
    check_attributes,
    is_paused,
)
from hpo.study.store.optuna_internals import read_trials
from hpo.study.store.schema import claims, workers
from hpo.study.store.storage import Storage, num_begun, num_open

_logger = logging.getLogger(__name__)

DEATH_CHECK_SECONDS = 1.0
"""Time between two checks for dead workers. With many workers, each checks less often."""
DEATH_CHECKS_AT_ONCE = 8
"""Number of workers that check per `DEATH_CHECK_SECONDS`, so that the cost stays linear in the workers."""


@dataclass(frozen=True)
class Runnable:
    """Test of parameters: a device without some precisions can run the trial."""

    precisions: Sequence[str] = ()  # all precisions of the study; empty: the device decides
    left_out: frozenset[str] = frozenset()  # precisions missing on the device, by `choice_name`

    def __call__(self, params: Mapping[str, Any]) -> bool:
        """Return true if the device can run a trial with these parameters. Some may be missing."""
        return any(self.left_out.isdisjoint(names) for names in self._needs(params))

    def lacks(self, unfinished: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
        """Return the precisions that the device lacks and trials with these parameters may need."""
        needs = (names for params in unfinished for names in self._needs(params))
        needed = self.left_out & {name for names in needs for name in names}
        ordered = [name for name in self.precisions if name in needed]
        return (*ordered, *sorted(needed.difference(self.precisions)))

    def _needs(self, params: Mapping[str, Any]) -> Sequence[Sequence[str]]:
        own = named_choices(params)
        if PRECISION in params or not self.precisions:
            return [own]
        return [[name, *own] for name in self.precisions]


EVERYTHING = Runnable()


@dataclass
class Snapshot:
    """A study as seen by a worker without a trial."""

    trials: Mapping[int, FrozenTrial]  # trials of hpo, by number
    rows: Mapping[int, sa.Row[Any]]  # claims of the unfinished trials, by the trial's number
    num_open: int  # number of the study's `n_trials` that have not begun
    new: Sequence[Point]  # possible parameters of a new trial; [{}]: any
    is_spent: bool  # true if the study has spent its budget
    hosts: Set[str] = frozenset()  # machines of other live workers
    num_begun: int = field(init=False)  # begun ones of the study's `n_trials`
    num_new: int = field(init=False)  # trials that may still begin within the budget
    num_planned: int = field(init=False)  # begun trials and `num_new`
    may_begin: bool = field(init=False)  # true if a live worker may begin another trial
    free: list[FrozenTrial] = field(default_factory=list)  # RUNNING, without a worker, not paused
    running: list[FrozenTrial] = field(default_factory=list)  # RUNNING with other live workers
    num_unseen: int = field(init=False)  # trials that began between the readings of trials and claims
    paused: list[FrozenTrial] = field(default_factory=list)
    waiting: list[FrozenTrial] = field(default_factory=list)
    """Enqueued trials, and retries of failed attempts, which count among the `n_trials` already."""
    promoted: list[FrozenTrial] = field(default_factory=list)  # paused trials that continue now
    fallen_behind: Sequence[FrozenTrial] = ()  # paused trials that never continue

    def unfinished(self) -> list[Mapping[str, Any]]:
        """Return the known parameters of the trials that must run before the study is finished.

        A paused trial is among them if it is promoted, or if the end of a running trial may promote it.
        """
        rest = [] if self.is_spent else [*self.free, *self.promoted, *self.waiting]
        rest += [*self.running, *(self.paused if self.running or self.num_unseen else ())]
        return [*map(known_params, rest), *[{}] * self.num_unseen, *(self.new if self.num_new else ())]


class Watch:
    """Reads snapshots of a study again and again, and each ended trial once."""

    def __init__(
        self,
        storage: Storage,
        study: optuna.Study,
        promotion: Promotion | None,
        budget: StudyBudget | None,
    ) -> None:
        self._storage = storage
        self._study = study
        self._budget = budget
        self.promotion = promotion  # as of the last reading
        self._standings = None if promotion is None else Standings(promotion, self._continues_last)
        self._failures, self._blamed = Failures(), frozenset[Choice]()
        self._num_objectives = len(study.directions)
        self._unfinished: list[int] = []
        self._last_seen = -1
        self._dead: set[str] = set()
        self._next_death_check = -math.inf

    def read(self, worker: str, runnable: Runnable, points: Sequence[Point] | None) -> Snapshot:
        """Read the study for a worker that can run `runnable` trials.

        `points` are the configurations of a grid or a comparison; None: the sampler proposes.
        """
        trials = {one.number: one for one in self._storage.persist(lambda: read_trials(self._study))}
        unfinished = self._unfinished_of(trials)
        return self._storage.read(lambda it: self._read(it, trials, unfinished, worker, runnable, points))

    def _unfinished_of(self, trials: Mapping[int, FrozenTrial]) -> list[FrozenTrial]:
        known = [trials[number] for number in self._unfinished if number in trials]
        new = [trial for number, trial in trials.items() if number > self._last_seen]
        unfinished = []
        for trial in (*known, *new):
            if trial.state != TrialState.WAITING:
                check_attributes(trial, self._num_objectives)
            if not trial.state.is_finished():
                unfinished.append(trial)
                continue
            if self._standings is not None:
                self._standings.add_ended(trial)
                self._failures.add_ended(trial)
            if self._budget is not None:
                self._budget.add_ended(trial)
        self._unfinished = [trial.number for trial in unfinished]
        self._last_seen = max(trials, default=-1)
        return unfinished

    def _continues_last(self, trial: FrozenTrial) -> bool:
        """Return true if a paused trial continues after all others: its precision broke in other trials."""
        return not self._blamed.isdisjoint(choices_of(trial))

    def _read(
        self,
        connection: sa.Connection,
        trials: Mapping[int, FrozenTrial],
        unfinished: Sequence[FrozenTrial],
        worker: str,
        runnable: Runnable,
        points: Sequence[Point] | None,
    ) -> Snapshot:
        name = self._study.study_name
        of_unfinished = claims.c.trial_number.in_([trial.number for trial in unfinished])
        columns = [column for column in claims.c if column is not claims.c.facts]  # long texts
        query = sa.select(*columns).where(claims.c.study == name, of_unfinished)
        rows = {row.trial_number: row for row in connection.execute(query)}
        live = (workers.c.study == name, workers.c.state == "live", workers.c.id != worker)
        others = connection.execute(
            sa.select(workers.c.id, workers.c.host, workers.c.left_out).where(*live)
        ).all()
        owners = {row.owner for row in rows.values()} - {None, worker}
        self._check_for_dead(connection, owners | {row.id for row in others})
        others = [row for row in others if row.id not in self._dead]
        seen = Snapshot(
            trials,
            rows,
            num_open=num_open(connection, name),
            new=[{}] if points is None else unused_points(points, num_trials_of_points(connection, name)),
            is_spent=self._budget is not None and self._budget.is_spent(connection),
        )
        for trial in unfinished:
            row = rows.get(trial.number)
            if trial.state == TrialState.WAITING:
                seen.waiting.append(trial)
            elif row is not None:  # otherwise somebody has removed its claim
                has_worker = row.owner not in (None, worker) and row.owner not in self._dead
                kind = seen.running if has_worker else seen.paused if is_paused(trial) else seen.free
                kind.append(trial)
        unseen = sa.select(sa.func.count()).where(
            claims.c.study == name, claims.c.trial_number > self._last_seen
        )
        seen.num_unseen = connection.execute(unseen).scalar_one()
        seen.hosts = {row.host for row in others}
        left_out = {frozenset(json.loads(row.left_out or "[]")) for row in others}
        runnables = [runnable, *(Runnable(runnable.precisions, lacking) for lacking in left_out)]
        self._plan(connection, seen, runnables)
        return seen

    def _check_for_dead(self, connection: sa.Connection, others: set[str]) -> None:
        if not others or time.monotonic() < self._next_death_check:
            return
        pause = DEATH_CHECK_SECONDS * max(1.0, len(others) / DEATH_CHECKS_AT_ONCE)
        self._next_death_check = time.monotonic() + pause
        of_study = workers.c.study == self._study.study_name
        self._dead = others - self._storage.live_workers(connection, of_study).keys()

    def _plan(self, connection: sa.Connection, seen: Snapshot, runnables: Sequence[Runnable]) -> None:
        """Add the trials that may begin, continue or end now, on any live worker."""

        def can_run(params: Mapping[str, Any]) -> bool:
            return any(runnable(params) for runnable in runnables)

        waits = {trial.number for trial in seen.paused if can_run(known_params(trial))}
        ours = [*seen.free, *seen.running, *seen.paused]
        rungs: Sequence[Rung] = ()
        if self._standings is not None:
            self._blamed = frozenset(self._failures.blamed(ours))
            continued = {number for number, row in seen.rows.items() if row.paused_at is None}
            before = self._standings.left_out
            rungs = self._standings.rungs(ours, lambda trial: trial.number in waits, continued)
            self.promotion = self._standings.promotion
            if self._standings.left_out != before:
                _logger.info("%s", self._standings.left_out)
            if self._budget is not None:
                self._budget.promotion = self.promotion
        num_new = 0 if seen.is_spent else max(0, seen.num_open)
        if num_new and self._budget is not None:
            retries = sum(trial.number in seen.rows for trial in seen.waiting)
            num_new = self._budget.forecast(connection, rungs, ours, retries, num_new).num_new
        seen.num_new = num_new
        seen.num_begun = num_begun(connection, self._study.study_name)
        seen.num_planned = seen.num_begun + num_new
        if not num_new:  # an enqueued trial would be one of them
            seen.waiting = [trial for trial in seen.waiting if trial.number in seen.rows]
        seen.may_begin = num_new > 0 and any(map(can_run, seen.new))
        if not seen.is_spent:
            known = self.promotion.rungs if self.promotion else ()
            # The study's pruner was another one when these paused, or their rung ranks nothing.
            seen.promoted = [trial for trial in seen.paused if trial.user_attrs[PAUSED_ATTR] not in known]
        if self._standings is not None:
            promoted = () if seen.is_spent else self._standings.promoted(rungs, more_begin=seen.may_begin)
            seen.promoted += [seen.trials[number] for number in promoted]
            seen.fallen_behind = [seen.trials[number] for number in self._standings.fallen_behind(rungs)]


def num_trials_of_points(connection: sa.Connection, study: str) -> dict[str, int]:
    counted = (claims.c.study == study, claims.c.counts, claims.c.point.is_not(None))
    query = sa.select(claims.c.point, sa.func.count()).where(*counted).group_by(claims.c.point)
    return {row[0]: row[1] for row in connection.execute(query)}
