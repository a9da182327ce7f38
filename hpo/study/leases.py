"""Which trial a worker runs next, and what becomes of it when the worker dies.

A *slot* is one logical trial, and a study has exactly `n_trials` of them. A worker claims a slot, runs the
slot's Optuna trial and closes the slot. A trial is made in the transaction that notes its number in the slot,
and ends in the one that closes or opens the slot, so wherever a worker was killed, what to do follows from
the slot's last trial:

    there is none  -> take one that somebody enqueued, else make one
    RUNNING        -> it goes on, with its number, its parameters and its checkpoint
    FAIL           -> make one with the same parameters, until the retries are used up; but only after an
                      unexpected exception, because a failure that was decided (no traceback) would be
                      decided again
    anything else  -> the slot is done

A worker that dies leaves its slot claimed. On the same machine the others see at once that its process is
gone; elsewhere its lease runs out. Whether the death counts against the trial's configuration is decided in
`deaths`. Leases are ours because Optuna's heartbeat runs only inside `study.optimize`, ends for good when the
database restarts, and fails a trial instead of continuing it.

Outcome -> Optuna state: a failure that would happen again is PRUNED with an infeasible constraint, never
FAIL, because samplers do not see FAIL and would return to the same broken precision.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import optuna
import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState

from hpo.errors import LeaseLostError
from hpo.json_safe import json_safe
from hpo.outcome import Outcome
from hpo.study import trial_rows
from hpo.study.deaths import Deaths, count_death, counted_cause
from hpo.study.grid_sampler import known_params
from hpo.study.membership import Membership
from hpo.study.schema import slots, studies, workers

if TYPE_CHECKING:
    from hpo.trial.telemetry import TrialResult

CONSTRAINT = "constraints:feasible"
"""The system attribute in which Optuna keeps the constraint `feasible` of a trial."""

LOOK_SECONDS = 1.0
"""How often a worker that finds free slots looks for dead workers too; of many workers each less often."""
LOOK_AT_ONCE = 8
"""So many workers look each `LOOK_SECONDS`, so that what it costs does not grow with the square of them."""


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

    study: str
    owner: str
    """The worker."""
    slot: int
    deaths: Deaths
    """Of its trial, when it was claimed."""
    trial_number: int | None = None
    """Of the slot's last Optuna trial."""
    trial_id: int | None = None
    """Optuna's, of the trial that runs here."""
    trained: bool = False
    """Whether `check` was called: the trial has made a step."""
    saved_step: int = 0
    """Of the newest checkpoint that was written of its trial."""
    lost: threading.Event = field(default_factory=threading.Event)
    """Set when another worker has the slot."""
    store_params: Callable[[], None] = lambda: None
    """Stores what was suggested to the trial, in one transaction. Raises LeaseLostError."""
    recorded: Callable[[], None] = lambda: None
    """Called when the outcome of its trial is stored."""
    halted: threading.Event = field(default_factory=threading.Event)
    """Set when the study was paused, cancelled or deleted: its trial is to stop and go on later."""

    @property
    def progress(self) -> dict[str, bool | int]:
        """What has changed in the slot's row."""
        changed: dict[str, bool | int] = {"trained": True} if self.trained else {}
        return changed | ({"saved_step": self.saved_step} if self.saved_step else {})

    def update(self, connection: sa.Connection, *conditions: sa.ColumnElement[bool], **values: Any) -> bool:
        """Change the slot's row, which stays locked until the end of the transaction; False: another worker
        has it, or one of the `conditions` does not hold."""
        owned = (slots.c.study == self.study, slots.c.slot == self.slot, slots.c.owner == self.owner)
        values = {"owner": self.owner, **self.progress, **values}
        return connection.execute(sa.update(slots).where(*owned, *conditions).values(values)).rowcount > 0

    def hold(self, connection: sa.Connection, *conditions: sa.ColumnElement[bool], **values: Any) -> None:
        """As `update`.

        Raises:
            LeaseLostError: another worker has the slot.
        """
        if not self.update(connection, *conditions, **values):
            self.lost.set()
            self.check()

    def check(self) -> None:
        """To be called between steps; reads a flag only.

        Raises:
            LeaseLostError: another worker has the slot, so this one must stop and store nothing.
        """
        self.trained = True
        if self.lost.is_set():
            raise LeaseLostError(f"Another worker has taken over slot {self.slot}.")


@lru_cache(maxsize=1)
def _taking(runnable: sa.ColumnElement[bool]) -> sa.Executable:
    """How the worker `by` takes an open slot of the study `of_study`, without a look at the others."""
    of_study, number = slots.c.study == sa.bindparam("of_study"), slots.c.trial_number
    free = sa.select(slots.c.slot).where(of_study, slots.c.state == "open", runnable)
    free = free.order_by(number, slots.c.slot)  # as the index; else PostgreSQL takes one that reads more
    first = (
        free.where(has_trial).limit(1).with_for_update(skip_locked=True).scalar_subquery()
        for has_trial in (number.is_not(None), number.is_(None))
    )
    is_open = sa.exists().where(studies.c.name == sa.bindparam("of_study"), studies.c.state == "open")
    take = sa.update(slots).where(of_study, slots.c.slot == sa.func.coalesce(*first), is_open)
    return take.values(state="running", owner=sa.bindparam("by")).returning(slots)


@dataclass(eq=False)
class WorkerLease(Membership):
    """A worker that claims slots of a study and runs their trials.

    On leaving the block, a slot that is still claimed opens again.
    """

    _: KW_ONLY
    max_retries: int
    """How often a trial that failed unexpectedly is tried again."""
    can_run: Callable[[Mapping[str, Any]], bool] | None = None
    """Whether this worker can run a trial with these parameters, perhaps not yet all, and {} for one that is
    not made yet; it leaves the others to other workers. None: it can run all."""
    refusal: Callable[[Mapping[str, Any]], str] = lambda _: ""
    """Why no worker can run an enqueued trial with these parameters; empty: one can."""
    saved_step: Callable[[int], int] = lambda _: 0
    """The step of the last checkpoint of the trial with this number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._may_have_slot = False
        self._looks_at = -math.inf  # for dead workers

    # Claims

    def claim(self) -> Lease | None:
        """Claim a slot: first one whose owner died, then one with an unfinished trial, then a fresh one.

        Returns:
            None when every slot is done, with a live worker, or has a trial that cannot run here, and when
            the study is not open.
        """
        self._disown()
        self._lease = self._storage.persist(self._claim)
        return self._lease

    def _disown(self) -> None:
        """Forget the trial that ran here; the heartbeat says nothing more of it."""
        if self._lease is not None and self._lease.trial_id is not None:
            self._storage.optuna.disown(self._lease.trial_id)
        self._lease = None

    def _claim(self) -> Lease | None:
        runnable = self._runnable()
        with self._storage.engine.begin() as connection:
            if found := self._own_slot(connection):
                return self._lease_of(found, Deaths.of_slot(found))
            self._may_have_slot = True
            looks = time.monotonic() >= self._looks_at
            if not looks and (found := self._take_open(connection, runnable)):
                return self._lease_of(found, Deaths.of_slot(found))
            if not self._look_whether_open(connection):
                return None
            if lease := self._take_abandoned(connection, runnable):
                return lease
            found = self._take_open(connection, runnable) if looks else None
            return self._lease_of(found, Deaths.of_slot(found)) if found else None

    def _lease_of(self, slot: sa.Row[Any], deaths: Deaths) -> Lease:
        name = self._study.study_name
        about = {"trial_number": slot.trial_number, "saved_step": slot.saved_step, "halted": self.halted}
        return Lease(name, self.id, slot.slot, deaths, **about)

    def _own_slot(self, connection: sa.Connection) -> sa.Row[Any] | None:
        """A slot that this worker has already: the connection broke after the commit of its claim, say."""
        if not self._may_have_slot:
            return None
        mine = (self._of_study, slots.c.state == "running", slots.c.owner == self.id)
        found = connection.execute(sa.select(slots).where(*mine)).first()
        self._may_have_slot = found is not None
        return found

    def _take_open(self, connection: sa.Connection, runnable: sa.ColumnElement[bool]) -> sa.Row[Any] | None:
        """Take an open slot, first one with an unfinished trial; None: there is none, or the study is not
        open."""
        about = {"of_study": self._study.study_name, "by": self.id}
        return connection.execute(_taking(runnable), about).one_or_none()

    def _take_abandoned(self, connection: sa.Connection, runnable: sa.ColumnElement[bool]) -> Lease | None:
        """Take the slot of a worker that is dead; None: there is none."""
        while found := self._abandoned(connection, runnable):
            deaths = self._deaths(connection, found)
            unchanged = (self._of_study, slots.c.slot == found.slot, slots.c.state == "running")
            claim = sa.update(slots).where(*unchanged, slots.c.owner == found.owner)
            if connection.execute(claim.values(owner=self.id, **deaths.columns)).rowcount:
                return self._lease_of(found, deaths)
        return None

    def unfinished(self) -> dict[int | None, Mapping[str, Any]]:
        """The parameters so far of the slots' unfinished trials, by number; None: {}, one is not made yet."""
        query = sa.select(slots.c.trial_number).where(self._of_study, slots.c.state != "done").distinct()
        with self._storage.engine.connect() as connection:
            numbers = connection.execute(query).scalars().all()
        trials = self._study.get_trials(deepcopy=False)
        return {number: {} if number is None else known_params(trials[number]) for number in numbers}

    def _runnable(self) -> sa.ColumnElement[bool]:
        """The condition that this worker can run the trial of a slot, or begin one where there is none."""
        if self.can_run is None:
            return sa.true()
        refused = [number for number, params in self.unfinished().items() if not self.can_run(params)]
        no_trial = slots.c.trial_number.is_(None)
        others = slots.c.trial_number.not_in([number for number in refused if number is not None])
        return sa.and_(~no_trial, others) if None in refused else sa.or_(no_trial, others)

    def _abandoned(self, connection: sa.Connection, runnable: sa.ColumnElement[bool]) -> sa.Row[Any] | None:
        query = sa.select(slots).where(self._of_study, slots.c.state == "running", runnable)
        rows = connection.execute(query.order_by(slots.c.slot)).all()
        self._looks_at = time.monotonic() + LOOK_SECONDS * max(1.0, len(rows) / LOOK_AT_ONCE)
        storage, name = self._storage, self._study.study_name
        witnessed = storage.availability.unbroken_seconds(storage.lease_seconds / 2)
        alive = storage.live_workers(connection, name, witnessed) if rows else set()
        return next((row for row in rows if row.owner not in alive), None)

    def _deaths(self, connection: sa.Connection, slot: sa.Row[Any]) -> Deaths:
        """The deaths in an abandoned slot, with that of its owner if it counts."""
        if slot.trial_number is None:
            return Deaths.of_slot(slot)
        owner = connection.execute(sa.select(workers).where(workers.c.id == slot.owner)).one_or_none()
        if owner is None:  # see `Membership`: it is forgotten, and how it ended is not known
            return Deaths.of_slot(slot)
        outlived = owner.id in self._alive_at_start or owner.number > self.number
        cause = counted_cause(owner, outlived=outlived)
        trial = self._study.get_trials(deepcopy=False)[slot.trial_number]
        if cause is None or "outcome" in trial.user_attrs:
            return Deaths.of_slot(slot)
        saved_step = max(slot.saved_step, self.saved_step(trial.number))
        return count_death(connection, slot, trial, saved_step, cause)

    # The trial of a slot

    def open_trial(self, lease: Lease) -> optuna.trial.Trial | None:
        """Return the trial to run in a claimed slot, or None when the slot proves to be done.

        A retried trial has the parameters of the failed one, and that one's number in the user attribute
        `retry_of`.

        Raises:
            LeaseLostError: another worker has the slot.
        """
        return self._storage.persist(lambda: self._open_trial(lease))

    def _open_trial(self, lease: Lease) -> optuna.trial.Trial | None:
        trial = None
        while trial is None:
            last = self._last_trial(lease)
            if last is None or (last.state == TrialState.FAIL and not _has_failed(last)):
                trial = self._take_enqueued(lease) or self._make_trial(lease, {}, {})
            elif last.state == TrialState.RUNNING:
                trial = last
            elif last.state == TrialState.FAIL and self._retries_left(last):
                # As `study.enqueue_trial` stores them.
                fixed = {"fixed_params": last.params}
                trial = self._make_trial(lease, fixed, {"retry_of": last.number})
            else:
                self._update_slot(lease, state="done")
                self._may_have_slot = False
                return None
        self._storage.optuna.own(self._study._study_id, trial)
        lease.trial_number, lease.trial_id = trial.number, trial._trial_id
        lease.store_params = partial(self._store_params, lease, trial._trial_id)
        return optuna.trial.Trial(self._study, trial._trial_id)

    def _last_trial(self, lease: Lease) -> FrozenTrial | None:
        if lease.trial_number is None:
            return None
        return self._study.get_trials(deepcopy=False)[lease.trial_number]

    def _make_trial(
        self, lease: Lease, system_attrs: Mapping[str, Any], user_attrs: Mapping[str, Any]
    ) -> FrozenTrial | None:
        """Make a trial for the slot; None: look at the slot again."""
        with self._storage.engine.begin() as connection:
            study_id = self._study._study_id
            trial = trial_rows.make_trial(connection, study_id, system_attrs, user_attrs)
            if self._note_trial(connection, lease, trial.number):
                return trial
            connection.rollback()
        self._reread(lease)
        return None

    def _take_enqueued(self, lease: Lease) -> FrozenTrial | None:
        """Start the first trial of `study.enqueue_trial` for the slot; None: there is none, or look again.

        One that no worker can run ends at once and takes no slot.
        """
        for trial in self._storage.optuna.enqueued_trials(self._study._study_id):
            if refusal := self.refusal(trial.system_attrs.get("fixed_params", {})):
                self._storage.fail_trial(trial, Outcome.FAILED, refusal)
                continue
            with self._storage.engine.begin() as connection:
                if not trial_rows.start_trial(connection, trial._trial_id):
                    continue  # another worker was faster
                if self._note_trial(connection, lease, trial.number):
                    trial.state = TrialState.RUNNING
                    return trial
                connection.rollback()
            self._reread(lease)
            break
        return None

    def _note_trial(self, connection: sa.Connection, lease: Lease, number: int) -> bool:
        """Note the number of the slot's new trial; False: the slot has changed."""
        unchanged = slots.c.trial_number.is_not_distinct_from(lease.trial_number)
        return lease.update(connection, unchanged, trial_number=number)

    def _reread(self, lease: Lease) -> None:
        """Look at a slot that has changed: by this one, where a connection broke too early."""
        mine = (self._of_study, slots.c.slot == lease.slot, slots.c.owner == self.id)
        with self._storage.engine.connect() as connection:
            row = connection.execute(sa.select(slots.c.trial_number).where(*mine)).one_or_none()
        if row is None:
            lease.lost.set()
            lease.check()
        else:
            lease.trial_number = row.trial_number

    def _retries_left(self, failed: FrozenTrial) -> bool:
        """Whether a slot whose last trial FAILed gets another one."""
        trials = self._study.get_trials(deepcopy=False)
        failures = [failed]
        while (before := failures[-1].user_attrs.get("retry_of")) is not None:
            failures.append(trials[before])
        unexpected = all("traceback" in trial.user_attrs for trial in failures)
        return unexpected and len(failures) <= self.max_retries

    def _update_slot(self, lease: Lease, **values: Any) -> None:
        with self._storage.engine.begin() as connection:
            lease.hold(connection, **values)

    def _store_params(self, lease: Lease, trial_id: int) -> None:
        def store() -> None:
            with self._storage.engine.begin() as connection:
                lease.hold(connection)
                self._storage.optuna.write(connection, trial_id)
            self._storage.optuna.written(trial_id)

        self._storage.persist(store)

    def release(self, lease: Lease) -> None:
        """Open a claimed slot again; its trial, if unfinished, goes on with the next worker."""

        def open_slot() -> None:
            with self._storage.engine.begin() as connection:
                lease.hold(connection, state="open")
                if lease.trial_id is not None:
                    self._storage.optuna.write(connection, lease.trial_id)

        self._storage.persist(open_slot)
        self._may_have_slot = False
        self._disown()

    def record_outcome(self, lease: Lease, trial: optuna.trial.Trial, result: TrialResult) -> None:
        """Store how a trial ended and close its slot, in one transaction.

        `preempted` opens the slot again with the trial still RUNNING; `failed` with a traceback opens it for
        a retry while retries are left.

        Raises:
            LeaseLostError: another worker has the slot; nothing is stored.
        """
        if result.outcome == Outcome.PREEMPTED:
            self.release(lease)
            return
        values = result.values if result.outcome == Outcome.COMPLETE else None
        if result.outcome == Outcome.COMPLETE and (not values or not all(map(math.isfinite, values))):
            raise ValueError(f"a complete trial must have finite values, but got {values}")
        storage = self._storage.optuna
        for key, value in trial_attributes(result).items():
            storage.set_trial_user_attr(trial._trial_id, key, json_safe(value))
        if result.outcome.infeasible:
            storage.set_trial_system_attr(trial._trial_id, CONSTRAINT, 1.0)
        own = storage.get_trial(trial._trial_id)
        if result.outcome == Outcome.PRUNED and own.last_step is not None:
            values = (own.intermediate_values[own.last_step],)  # as Optuna does
        slot: dict[str, Any] = {"state": "done"}
        if result.outcome == Outcome.FAILED and self._retries_left(own):
            slot = {
                "state": "open",
                "saved_step": 0,
                **Deaths().columns,
            }  # another trial, from its first step

        is_again = False

        def store() -> None:
            nonlocal is_again
            may_be_stored, is_again = is_again, True
            with self._storage.engine.begin() as connection:
                lease.hold(connection, slots.c.trial_number == trial.number, **slot)
                storage.write(connection, trial._trial_id)
                state = TrialState[result.outcome.optuna_state]
                if not (trial_rows.end_trial(connection, trial._trial_id, state, values) or may_be_stored):
                    raise LeaseLostError(f"Trial {trial.number} was ended by somebody else.")

        self._storage.persist(store)
        self._may_have_slot = False
        self._disown()


def _has_failed(trial: FrozenTrial) -> bool:
    """Whether a worker ended the trial as `failed`; else somebody gave it up."""
    return trial.user_attrs.get("outcome") == Outcome.FAILED
