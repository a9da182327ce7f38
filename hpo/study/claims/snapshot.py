"""The trials of a study as one worker sees them at one moment: free, running, paused, waiting.

Optuna's trials are read before the claims, on a connection of their own. A trial is claimed only if it is
still as it was seen.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import optuna
import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState

from hpo.study.claims.budget import StudyBudget
from hpo.study.claims.runnable import Runnable, known_params
from hpo.study.sampling.infeasible import Choice, Failures, choices_of
from hpo.study.sampling.points import Point, unused_points
from hpo.study.sampling.promotion import Promotion, Rung, Standings, check_attributes, is_paused
from hpo.study.store.optuna_internals import read_trials
from hpo.study.store.schema import claims, studies, workers
from hpo.study.store.storage import Storage

LOOK_SECONDS = 1.0
"""How often a worker looks for dead workers; of many workers each less often."""
LOOK_AT_ONCE = 8
"""So many workers look each `LOOK_SECONDS`, so that the cost does not grow with the square of them."""


@dataclass
class Snapshot:
    """What a worker sees that has no trial."""

    trials: Mapping[int, FrozenTrial]
    """Those of hpo in the study, by number."""
    rows: Mapping[int, sa.Row[Any]]
    """The claims of the unfinished trials, by the trial's number."""
    num_places: int
    """So many of the study's `n_trials` have not begun."""
    new: Sequence[Point]
    """The parameters that a new trial may get; [{}]: any."""
    is_spent: bool
    """Whether the study has spent its budget."""
    hosts: Set[str] = frozenset()
    """The machines of other live workers."""
    num_new: int = 0
    """Trials that may still begin, as far as the budget is known to be enough."""
    num_planned: int = 0
    """These and the trials that have begun."""
    may_begin: bool = False
    """Whether a live worker may begin another trial."""
    free: list[FrozenTrial] = field(default_factory=list)
    """RUNNING, without a worker, and not paused."""
    running: list[FrozenTrial] = field(default_factory=list)
    """RUNNING with other live workers."""
    num_unseen: int = 0
    """How many trials began after the trials were read, and before the claims were."""
    paused: list[FrozenTrial] = field(default_factory=list)
    waiting: list[FrozenTrial] = field(default_factory=list)
    """WAITING for a place of the study, or retries of failed attempts, which have one."""
    promoted: Sequence[FrozenTrial] = ()
    """The paused trials that continue now."""
    fallen_behind: Sequence[FrozenTrial] = ()
    """The paused trials that never continue."""

    def owner(self, trial: FrozenTrial) -> str | None:
        """The worker that had the trial."""
        owner: str | None = self.rows[trial.number].owner
        return owner

    def host(self, trial: FrozenTrial) -> str | None:
        """The machine that wrote the newest checkpoint of a trial; None: it has none."""
        host: str | None = self.rows[trial.number].host
        return host

    def unfinished(self) -> list[Mapping[str, Any]]:
        """Return the parameters so far of the trials that are to run before the study is finished.

        A paused trial is among them if it is promoted, or if a trial runs whose end may promote it.
        """
        rest = [] if self.is_spent else [*self.free, *self.promoted, *self.waiting]
        rest += [*self.running, *(self.paused if self.running or self.num_unseen else ())]
        return [*map(known_params, rest), *[{}] * self.num_unseen, *(self.new if self.num_new else ())]


class Watch:
    """Looks at a study again and again. A trial that has ended is looked at once."""

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
        self._standings = None if promotion is None else Standings(promotion, self._continues_last)
        self._failures, self._blamed = Failures(), frozenset[Choice]()
        self._num_objectives = len(study.directions)
        self._unfinished: list[int] = []
        self._last_seen = -1
        self._dead: set[str] = set()
        self._looks_at = -math.inf  # for dead workers

    def look(self, worker: str, runnable: Runnable, points: Sequence[Point] | None) -> Snapshot:
        """Look at the study for a worker.

        Args:
            runnable: what the worker can run.
            points: the configurations of a grid or a comparison; None: the sampler proposes.
        """
        trials = {one.number: one for one in self._storage.persist(lambda: read_trials(self._study))}
        unfinished = self._unfinished_of(trials)
        return self._storage.read(lambda it: self._look(it, trials, unfinished, worker, runnable, points))

    def _unfinished_of(self, trials: Mapping[int, FrozenTrial]) -> list[FrozenTrial]:
        """The unfinished trials; those that have ended since the last look are added to the standings."""
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
        """Whether a paused trial continues after all others: its precision has broken in other trials."""
        return not self._blamed.isdisjoint(choices_of(trial))

    def _look(
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
        columns = [column for column in claims.c if column is not claims.c.facts]  # which are long
        query = sa.select(*columns).where(claims.c.study == name, of_unfinished)
        rows = {row.trial_number: row for row in connection.execute(query)}
        others = self._others(connection, worker)
        owners = {row.owner for row in rows.values()} - {None, worker}
        self._look_for_dead(connection, owners | {row.id for row in others})
        others = [row for row in others if row.id not in self._dead]
        seen = Snapshot(
            trials,
            rows,
            num_places=num_places(connection, name),
            new=[{}] if points is None else unused_points(points, num_trials_of_points(connection, name)),
            is_spent=self._budget is not None and self._budget.is_spent(connection),
        )
        for trial in unfinished:
            row = rows.get(trial.number)
            if trial.state == TrialState.WAITING:
                if row is not None or seen.num_places > 0:
                    seen.waiting.append(trial)
            elif row is not None:  # else somebody has removed its claim
                has_worker = row.owner not in (None, worker) and row.owner not in self._dead
                kind = seen.running if has_worker else seen.paused if is_paused(trial) else seen.free
                kind.append(trial)
        unseen = sa.select(sa.func.count()).where(
            claims.c.study == name, claims.c.trial_number > self._last_seen
        )
        seen.num_unseen = connection.execute(unseen).scalar_one()
        seen.hosts = {row.host for row in others}
        left_out = {frozenset(json.loads(row.left_out or "[]")) for row in others}
        live = [runnable, *(Runnable(runnable.precisions, lacking) for lacking in left_out)]
        self._plan(connection, seen, live)
        return seen

    def _look_for_dead(self, connection: sa.Connection, others: set[str]) -> None:
        """Note which of these workers are dead. A dead worker without a trial counts too: it runs nothing."""
        if not others or time.monotonic() < self._looks_at:
            return
        self._looks_at = time.monotonic() + LOOK_SECONDS * max(1.0, len(others) / LOOK_AT_ONCE)
        of_study = workers.c.study == self._study.study_name
        self._dead = others - self._storage.live_workers(connection, of_study).keys()

    def _others(self, connection: sa.Connection, worker: str) -> list[Any]:
        """The other workers that have not left."""
        live = (workers.c.study == self._study.study_name, workers.c.state == "live", workers.c.id != worker)
        query = sa.select(workers.c.id, workers.c.host, workers.c.left_out).where(*live)
        return list(connection.execute(query))

    def _plan(self, connection: sa.Connection, seen: Snapshot, live: Sequence[Runnable]) -> None:
        """Fill in which trials may begin, continue or end now, on any live worker."""

        def can_run(params: Mapping[str, Any]) -> bool:
            return any(runnable(params) for runnable in live)

        waits = {trial.number for trial in seen.paused if can_run(known_params(trial))}
        ours = [*seen.free, *seen.running, *seen.paused]
        rungs: Sequence[Rung] = ()
        if self._standings is not None:
            self._blamed = frozenset(self._failures.blamed(ours))
            continued = {number for number, row in seen.rows.items() if row.paused_at is None}
            rungs = self._standings.rungs(ours, lambda trial: trial.number in waits, continued)
        num_new = 0 if seen.is_spent else max(0, seen.num_places)
        if num_new and self._budget is not None:
            retries = sum(trial.number in seen.rows for trial in seen.waiting)
            num_new = self._budget.forecast(connection, rungs, ours, retries, num_new).num_new
        seen.num_new = num_new
        seen.num_planned = num_begun(connection, self._study.study_name) + num_new
        if not num_new:  # an enqueued trial takes a place
            seen.waiting = [trial for trial in seen.waiting if trial.number in seen.rows]
        seen.may_begin = num_new > 0 and any(map(can_run, seen.new))
        if self._standings is not None:
            promoted = () if seen.is_spent else self._standings.promoted(rungs, more_begin=seen.may_begin)
            seen.promoted = [seen.trials[number] for number in promoted]
            seen.fallen_behind = [seen.trials[number] for number in self._standings.fallen_behind(rungs)]


def num_begun(connection: sa.Connection, study: str) -> int:
    """Return how many of a study's `n_trials` have begun."""
    counted = (claims.c.study == study, claims.c.counts)
    return int(connection.execute(sa.select(sa.func.count()).where(*counted)).scalar_one())


def num_places(connection: sa.Connection, study: str) -> int:
    """Return how many of a study's `n_trials` have not begun."""
    size = connection.execute(sa.select(studies.c.n_trials).where(studies.c.name == study)).scalar()
    return (size or 0) - num_begun(connection, study)


def num_trials_of_points(connection: sa.Connection, study: str) -> dict[str, int]:
    """Return how many trials of a study have a point, by its `point_key`."""
    counted = (claims.c.study == study, claims.c.counts, claims.c.point.is_not(None))
    query = sa.select(claims.c.point, sa.func.count()).where(*counted).group_by(claims.c.point)
    return {row[0]: row[1] for row in connection.execute(query)}
