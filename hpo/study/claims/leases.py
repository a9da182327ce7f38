"""Claims: the trial that a worker runs next, and its fate when the worker dies.

A *slot* is one logical trial, and a study has exactly `n_trials` of them. A worker claims a slot, runs the
slot's Optuna trial and closes the slot. A trial is made in the transaction that notes its number in the slot;
when it has ended, the slot is closed. So wherever a worker was killed, the slot's last trial decides:

    there is none  -> take one that somebody enqueued, else make one
    RUNNING        -> it goes on, with its number, its parameters and its checkpoint
    paused         -> in an open slot it is among the best (`promotion`): make one that goes on from its
                      checkpoint; else the slot is paused
    FAIL           -> make one with the same parameters, until the retries are used up; but only after an
                      unexpected exception
    anything else  -> the slot is done

A worker that dies leaves its slot claimed. On the same machine the others see at once that its process is
gone; elsewhere its lease runs out. Leases are ours because Optuna's heartbeat runs only inside
`study.optimize`, ends for good when the database restarts, and fails a trial instead of continuing it.

A configuration that kills its process (the kernel's out-of-memory killer, a segmentation fault) would be
taken over for ever, but most deaths are not its fault: a node that is taken away, `kill -9`. So a trial ends
as `crashed` only when `MAX_DEATHS` of its workers died in a row without progress. The worker that takes over
the slot counts the death, in the same transaction. A worker that lost its GPU counts its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import optuna
import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState

from hpo.outcome import Outcome
from hpo.study.claims.budget import StudyBudget
from hpo.study.claims.lease import Lease as Lease
from hpo.study.claims.openings import Openings, is_open_study
from hpo.study.claims.workers import Membership
from hpo.study.sampling.grid_sampler import known_params
from hpo.study.sampling.promotion import (
    ORIGIN_ATTR,
    PAUSED_ATTR,
    RESUMED_ATTR,
    Promotion,
    is_paused,
    origin_of,
)
from hpo.study.store.optuna_internals import copy_reports, make_trial, start_trial, study_id_of, trial_id_of
from hpo.study.store.schema import NO_PROGRESS, copy_evaluations, evaluations, slots, workers

if TYPE_CHECKING:
    from hpo.trial.telemetry import TrialResult

LOOK_SECONDS = 1.0
"""How often a worker that finds free slots looks for dead workers too; of many workers each less often."""
LOOK_AT_ONCE = 8
"""So many workers look each `LOOK_SECONDS`, so that what it costs does not grow with the square of them."""


@lru_cache(maxsize=1)
def _claim_open(runnable: sa.ColumnElement[bool]) -> sa.Executable:
    """How the worker `by` claims an open slot of the study `of_study`, without a look at the others."""
    of_study, number = slots.c.study == sa.bindparam("of_study"), slots.c.trial_number
    free = sa.select(slots.c.slot).where(of_study, slots.c.state == "open", runnable)
    free = free.order_by(number, slots.c.slot)  # as the index; else PostgreSQL takes one that reads more
    first = (
        free.where(has_trial).limit(1).with_for_update(skip_locked=True).scalar_subquery()
        for has_trial in (number.is_not(None), number.is_(None))
    )
    is_next = slots.c.slot == sa.func.coalesce(*first)
    claim = sa.update(slots).where(of_study, is_next, is_open_study(sa.bindparam("of_study")))
    return claim.values(state="running", owner=sa.bindparam("by")).returning(slots)


@dataclass(eq=False)
class WorkerLease(Membership):
    """A worker that claims slots of a study and runs their trials.

    On leaving the block, a slot that is still claimed opens again. `promotion` and `budget`: see `Openings`.
    """

    _: KW_ONLY
    max_retries: int
    can_run: Callable[[Mapping[str, Any]], bool] | None = None
    """Whether this worker can run a trial with these parameters, perhaps not yet all, and {} for one that is
    not made yet; it leaves the others to other workers. None: it can run all."""
    refusal: Callable[[Mapping[str, Any]], str] = lambda _: ""
    """Why no worker can run an enqueued trial with these parameters; empty: one can."""
    promotion: Promotion | None = None
    budget: StudyBudget | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._openings = Openings(self._study, self.promotion, self.budget)
        self._may_have_slot = False
        self._looks_at = -math.inf  # for dead workers

    # Claims

    def claim(self) -> Lease | None:
        """Claim a slot: first one whose owner died, then one with a trial that goes on, then a fresh one.

        Returns None if the study is not open, or no slot is left that this worker can run.
        """
        self._lease = None
        lease = self._storage.persist(self._claim)
        if lease is not None and self.budget is not None:
            lease.clock.num_sharing = self._storage.read(self._num_sharing)
        self._lease = lease
        return self._lease

    def _claim(self) -> Lease | None:
        runnable = self._runnable()
        with self._storage.engine.begin() as connection:
            if slot := self._claimed_before(connection):
                return self._lease_of(slot)
            self._may_have_slot = True
            may_begin = self._openings.may_begin(connection)
            if not may_begin:
                runnable = sa.and_(runnable, slots.c.trial_number.is_not(None))
            if self.promotion is not None:
                self._openings.let_go_on(connection)
            looks = time.monotonic() >= self._looks_at
            if not looks and (slot := self._open_slot(connection, runnable)):
                return self._lease_of(slot)
            if not self._look_whether_open(connection):
                return None
            slot = self._take_over(connection, runnable)
            if slot is None and looks:
                slot = self._open_slot(connection, runnable)
            if slot is None and self.promotion is None:  # paused ones are of a pruner that the study had
                self._openings.let_go_on(connection)
            if slot is None and not may_begin:
                self._openings.drop_fresh_slots(connection)
            return self._lease_of(slot) if slot else None

    def _lease_of(self, slot: sa.Row[Any]) -> Lease:
        return Lease(
            self._storage,
            self._study.study_name,
            self.id,
            slot.slot,
            slot.trial_number,
            saved_step=slot.saved_step,
            deaths=slot.deaths,
            death_step=slot.death_step,
            study_closed=self.study_closed,
            budget=self.budget,
        )

    def _claimed_before(self, connection: sa.Connection) -> sa.Row[Any] | None:
        """A slot that this worker has already: the connection broke after the commit of its claim, say."""
        if not self._may_have_slot:
            return None
        mine = (self._of_study, slots.c.state == "running", slots.c.owner == self.id)
        slot = connection.execute(sa.select(slots).where(*mine)).first()
        self._may_have_slot = slot is not None
        return slot

    def _open_slot(self, connection: sa.Connection, runnable: sa.ColumnElement[bool]) -> sa.Row[Any] | None:
        """Claim an open slot, first one with an unfinished trial; None: none is open."""
        about = {"of_study": self._study.study_name, "by": self.id}
        return connection.execute(_claim_open(runnable), about).one_or_none()

    def _take_over(self, connection: sa.Connection, runnable: sa.ColumnElement[bool]) -> sa.Row[Any] | None:
        """Claim the slot of a worker that is dead; None: there is none."""
        while slot := self._abandoned(connection, runnable):
            unchanged = (self._of_study, slots.c.slot == slot.slot, slots.c.state == "running")
            claim = sa.update(slots).where(*unchanged, slots.c.owner == slot.owner).returning(slots)
            values = {"owner": self.id, **self._death(connection, slot)}
            if claimed := connection.execute(claim.values(values)).one_or_none():
                return claimed
        return None

    def unfinished(self) -> dict[int | None, Mapping[str, Any]]:
        """The parameters so far of the slots' unfinished trials, by number; None: {}, one is not made yet.

        Paused trials count while a live worker runs one, whose end may let them go on.
        """
        query = sa.select(slots.c.state, slots.c.trial_number, slots.c.owner)

        def read(connection: sa.Connection) -> set[int | None]:
            rows = connection.execute(query.where(self._of_study, slots.c.state != "done")).all()
            if any(row.state == "paused" for row in rows):
                alive = self._storage.live_workers(connection, workers.c.study == self._study.study_name)
                if not any(row.state == "running" and row.owner in alive for row in rows):
                    rows = [row for row in rows if row.state != "paused"]
            numbers = {row.trial_number for row in rows}
            return numbers & self._openings.in_work(connection).keys()

        return self._params_of(self._storage.read(read))

    def _params_of(self, numbers: Iterable[int | None]) -> dict[int | None, Mapping[str, Any]]:
        trials = self._study.get_trials(deepcopy=False)
        return {number: {} if number is None else known_params(trials[number]) for number in numbers}

    def _runnable(self) -> sa.ColumnElement[bool]:
        """The condition that this worker can run the trial of a slot, or begin one where there is none."""
        if self.can_run is None:
            return sa.true()
        unfinished = self._params_of(self._storage.read(self._openings.states))
        refused = {number for number, params in unfinished.items() if not self.can_run(params)}
        number = slots.c.trial_number
        others = sa.or_(number.is_(None), number.not_in(refused - {None}))
        return sa.and_(number.is_not(None), others) if None in refused else others

    def _abandoned(self, connection: sa.Connection, runnable: sa.ColumnElement[bool]) -> sa.Row[Any] | None:
        query = sa.select(slots).where(self._of_study, slots.c.state == "running", runnable)
        rows = connection.execute(query.order_by(slots.c.slot)).all()
        self._looks_at = time.monotonic() + LOOK_SECONDS * max(1.0, len(rows) / LOOK_AT_ONCE)
        if not rows:
            return None
        storage, members = self._storage, workers.c.study == self._study.study_name
        witnessed = storage.availability.unbroken_seconds(storage.lease_seconds / 2)
        alive = storage.live_workers(connection, members, witnessed_seconds=witnessed)
        return next((row for row in rows if row.owner not in alive), None)

    def _death(self, connection: sa.Connection, slot: sa.Row[Any]) -> dict[str, int]:
        """How the death of its owner changes an abandoned slot; {} if the owner was not in the trial.

        A checkpoint that the owner wrote after its last heartbeat is no progress here.
        """
        owner = connection.execute(sa.select(workers.c.id).where(workers.c.id == slot.owner)).first()
        if owner is None or slot.trial_number is None:  # owner: its row was lost, see `Membership`
            return {}
        if "outcome" in self._trial(slot.trial_number).user_attrs:  # it had ended
            return {}
        last_evaluation = sa.select(sa.func.max(evaluations.c.step)).where(
            evaluations.c.study == slot.study, evaluations.c.trial_number == slot.trial_number
        )
        step = max(connection.execute(last_evaluation).scalar() or 0, slot.saved_step)
        count = 1 if step > slot.death_step else slot.deaths + 1
        return {"deaths": count, "death_step": max(step, slot.death_step)}

    # The trial of a slot

    def open_trial(self, lease: Lease) -> optuna.trial.Trial | None:
        """Return the trial to run in a claimed slot, or None when the slot proves to be done.

        A retried trial has the parameters of the failed one, and its number in the user attribute `retry_of`.
        Raises LeaseLostError if another worker has the slot.
        """
        lease.trial = self._storage.persist(lambda: self._open_trial(lease))
        return lease.trial

    def _open_trial(self, lease: Lease) -> optuna.trial.Trial | None:
        while True:
            last = None if lease.trial_number is None else self._trial(lease.trial_number)
            if last is not None and last.state == TrialState.RUNNING:
                return optuna.trial.Trial(self._study, trial_id_of(last))
            if last is not None and self.promotion is not None and is_paused(last):
                unfinished = self._storage.read(self._openings.in_work).keys()
                trials = self._study.get_trials(deepcopy=False)
                if last.number not in self.promotion.going_on(trials, unfinished):
                    self.release(lease, "paused")  # its worker had not told the slot that it has paused, say
                    return None
                origin = origin_of(last.number, last.user_attrs)
                at = {RESUMED_ATTR: last.user_attrs[PAUSED_ATTR]}
                self._make_trial(lease, last, {ORIGIN_ATTR: origin, **at})
                continue
            # Where no worker ended it as `failed`, somebody gave it up.
            failed = last is not None and last.user_attrs.get("outcome") == Outcome.FAILED
            if last is None or (last.state == TrialState.FAIL and not failed):
                if not self._start_enqueued(lease):
                    self._make_trial(lease)
            elif last.state == TrialState.FAIL and self._is_retried(last, last.user_attrs.get("traceback")):
                goes_on = {k: last.user_attrs[k] for k in (ORIGIN_ATTR, RESUMED_ATTR) if k in last.user_attrs}
                self._make_trial(lease, last, {"retry_of": last.number, **goes_on})
            else:
                self._storage.write(lambda connection: lease.hold(connection, state="done"))
                self._forget()
                return None

    def _trial(self, number: int) -> FrozenTrial:
        return self._study.get_trials(deepcopy=False)[number]

    def _make_trial(
        self, lease: Lease, last: FrozenTrial | None = None, user_attrs: Mapping[str, Any] = {}
    ) -> None:
        """Make a trial for the slot, unless it has got another one meanwhile.

        It has the parameters of the `last` trial, and if it goes on from its checkpoint also its evaluations.
        """
        system_attrs = {} if last is None else {"fixed_params": last.params}
        goes_on, study_id = ORIGIN_ATTR in user_attrs, study_id_of(self._study)
        with self._storage.engine.begin() as connection:
            number = make_trial(connection, study_id, system_attrs, user_attrs)
            if not self._note_trial(connection, lease, number, saved_step=lease.saved_step if goes_on else 0):
                connection.rollback()
            elif last is not None and goes_on:
                copy_reports(connection, study_id, last.number, number)
                copy_evaluations(connection, self._study.study_name, last.number, number)
        self._reread(lease)

    def _start_enqueued(self, lease: Lease) -> bool:
        """Start the first enqueued trial for the slot; False: none waits.

        A trial that no worker can run ends at once and takes no slot.
        """
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            if refusal := self.refusal(trial.system_attrs.get("fixed_params", {})):
                self._storage.fail_trial(trial, Outcome.FAILED, refusal)
                continue
            with self._storage.engine.begin() as connection:
                if not start_trial(connection, trial_id_of(trial)):
                    continue  # another worker was faster
                if not self._note_trial(connection, lease, trial.number):
                    connection.rollback()
            self._reread(lease)
            return True
        return False

    def _note_trial(
        self, connection: sa.Connection, lease: Lease, number: int, *, saved_step: int = 0
    ) -> bool:
        """Note the slot's new trial and the step of its checkpoint; False: the slot has changed."""
        lease.deaths, lease.saved_step, lease.progress = 0, saved_step, None
        unchanged = slots.c.trial_number.is_not_distinct_from(lease.trial_number)
        progress = NO_PROGRESS | {"saved_step": saved_step}
        return lease.update(connection, unchanged, trial_number=number, **progress)

    def _reread(self, lease: Lease) -> None:
        """Look which trial the slot has now."""
        mine = (self._of_study, slots.c.slot == lease.slot, slots.c.owner == self.id)
        query = sa.select(slots.c.trial_number).where(*mine)
        row = self._storage.read(lambda connection: connection.execute(query).one_or_none())
        if row is None:
            lease.lost.set()
            lease.check()
        else:
            lease.trial_number = row.trial_number

    def _is_retried(self, failed: optuna.trial.Trial | FrozenTrial, traceback: str | None) -> bool:
        """Return whether a failed trial is tried again; a decided failure has no traceback."""
        num_failures, number = 1, failed.user_attrs.get("retry_of")
        while number is not None:
            num_failures, number = num_failures + 1, self._trial(number).user_attrs.get("retry_of")
        return bool(traceback) and num_failures <= self.max_retries

    def release(self, lease: Lease, state: str = "open") -> None:
        """Open a claimed slot again; its trial, if unfinished, goes on with the next worker."""
        self._storage.write(lambda connection: lease.hold(connection, state=state))
        self._forget()

    def record_death(self, lease: Lease) -> None:
        """Open a claimed slot again, and count a death of its worker, which has lost its GPU.

        This process may stay alive, as in a notebook, and then no other worker would count its death.
        """

        def write(connection: sa.Connection) -> None:
            mine = (self._of_study, slots.c.slot == lease.slot)
            if lease.update(connection, slots.c.state == "running"):  # else another worker has it
                slot = connection.execute(sa.select(slots).where(*mine)).one()
                lease.update(connection, state="open", **self._death(connection, slot))

        self._storage.write(write)
        self._forget()

    def record_outcome(self, lease: Lease, trial: optuna.trial.Trial, result: TrialResult) -> None:
        """Store how a trial ended and close its slot.

        The slot opens again for a `preempted` trial, which is still RUNNING, and for the retry of a `failed`
        one. Raises LeaseLostError, and stores nothing, if another worker has the slot.
        """
        if result.outcome == Outcome.PREEMPTED:
            self.release(lease)
            return
        values = result.values if result.outcome == Outcome.COMPLETE else (0.0,)
        if not values or not all(map(math.isfinite, values)):
            raise ValueError(f"a complete trial must have finite values, but got {values}")
        lease.trial = trial

        def record() -> None:
            failed = result.outcome == Outcome.FAILED
            if failed and self._is_retried(trial, result.traceback):
                lease.record(result, "open")
            elif result.outcome == Outcome.PRUNED and self.promotion and PAUSED_ATTR in trial.user_attrs:
                lease.record(result, "paused")
            else:
                lease.record(result, "done")

        self._storage.persist(record)
        self._forget()

    def _forget(self) -> None:
        """The slot is not this worker's any more; the heartbeat says nothing more of it."""
        self._may_have_slot = False
        self._lease = None
