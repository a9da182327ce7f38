"""Which trial a worker runs next, and what becomes of it when the worker dies.

A *slot* is one logical trial, and a study has exactly `n_trials` of them. A worker claims a slot, runs the
slot's Optuna trial and closes the slot. Every Optuna trial carries the number of its slot before it runs, so
wherever a worker was killed, what to do follows from the slot's trials:

    no trial              -> take one that somebody enqueued, else make one
    one that is RUNNING   -> it goes on, with its number, its parameters and its checkpoint
    the last one FAILed   -> make one with the same parameters, until the retries are used up; but only
                             after an unexpected exception, because a failure that was decided (no
                             traceback) would be decided again
    anything else         -> the slot is done

A worker that dies leaves its slot claimed. On the same machine the others see at once that its process is
gone; elsewhere its lease runs out. Whether the death counts against the trial's configuration is decided in
`deaths`. Leases are ours because Optuna's heartbeat runs only inside `study.optimize`, ends for good when the
database restarts, and fails a trial instead of continuing it.

Outcome -> Optuna state: a failure that would happen again is PRUNED with an infeasible constraint, never
FAIL, because samplers do not see FAIL and would return to the same broken precision.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

import optuna
import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from hpo.errors import LeaseLostError
from hpo.json_safe import json_safe
from hpo.outcome import Outcome
from hpo.study.database import exclusive, explain
from hpo.study.deaths import Deaths, count_death, counted_cause, num_oom_kills
from hpo.study.lifecycle import study_state
from hpo.study.process import process_start, this_job, this_machine
from hpo.study.samplers import known_params
from hpo.study.schema import slots, workers
from hpo.study.storage import Storage

if TYPE_CHECKING:
    from hpo.trial.telemetry import TrialResult

_logger = logging.getLogger(__name__)

SLOT_ATTR = "hpo:slot"
CONSTRAINT = "feasible"


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

    slot: int
    deaths: Deaths
    """Of its trial, when it was claimed."""
    trained: bool = False
    """Whether `check` was called: the trial has made a step."""
    lost: threading.Event = field(default_factory=threading.Event)
    """Set when another worker has the slot."""
    halted: threading.Event = field(default_factory=threading.Event)
    """Set when the study was paused, cancelled or deleted: its trial is to stop and go on later."""

    @property
    def progress(self) -> dict[str, bool]:
        """What has changed in the slot's row."""
        return {"trained": True} if self.trained else {}

    def check(self) -> None:
        """To be called between steps; reads a flag only.

        Raises:
            LeaseLostError: another worker has the slot, so this one must stop and store nothing.
        """
        self.trained = True
        if self.lost.is_set():
            raise LeaseLostError(f"Another worker has taken over slot {self.slot}.")


@dataclass(eq=False)
class WorkerLease:
    """This process in a study: its row says that it lives, and a thread keeps that fresh.

    On leaving the block, a slot that is still claimed opens again.
    """

    _storage: Storage
    _study: optuna.Study
    _: KW_ONLY
    max_retries: int
    """How often a trial that failed unexpectedly is tried again."""
    device: str | None = None
    """The `DeviceInfo.device_id` of what its trials run on, where known."""
    can_run: Callable[[Mapping[str, Any]], bool] | None = None
    """Whether this worker can run a trial with these parameters, perhaps not yet all, and {} for one that is
    not made yet; it leaves the others to other workers. None: it can run all."""
    refusal: Callable[[Mapping[str, Any]], str] = lambda _: ""
    """Why no worker can run an enqueued trial with these parameters; empty: one can."""
    saved_step: Callable[[int], int] = lambda _: 0
    """The step of the last checkpoint of the trial with this number."""
    reservation: str = ""
    """The row of `hpo_workers` that has stood for this worker, to be replaced by its own."""

    number: int = field(init=False)
    """Of the worker in the study, from 0; no other worker of the study ever has it."""

    def __post_init__(self) -> None:
        self.id = f"{socket.gethostname()[:100]}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._of_study = slots.c.study == self._study.study_name
        self._lease: Lease | None = None
        self.halted = threading.Event()
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> WorkerLease:
        self._storage.persist(self._register)
        self._thread.start()
        return self

    def _register(self) -> None:
        """Add this worker's row, with the next number; the data cannot be exchanged at the same time."""
        storage, name = self._storage, self._study.study_name
        last_number = sa.select(sa.func.max(workers.c.number)).where(workers.c.study == name)
        with exclusive(storage.engine):
            storage.check_data(name)
            with storage.engine.begin() as connection:
                # The row of an attempt that was committed though the connection broke before the answer.
                connection.execute(sa.delete(workers).where(workers.c.id.in_((self.id, self.reservation))))
                last = connection.execute(last_number).scalar()
                self.number = 0 if last is None else last + 1
                self._alive_at_start = storage.live_workers(connection, name)
                connection.execute(
                    sa.insert(workers).values(
                        id=self.id,
                        study=name,
                        host=socket.gethostname(),
                        machine=this_machine(),
                        pid=os.getpid(),
                        process_start=process_start(os.getpid()) or "",
                        device=self.device,
                        started=storage.now,
                        last_seen=storage.now,
                        oom_kills=num_oom_kills(),
                        state="live",
                        number=self.number,
                        job=this_job(),
                    )
                )

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        self._thread.join()
        mine = (self._of_study, slots.c.owner == self.id, slots.c.state == "running")
        me = sa.update(workers).where(workers.c.id == self.id)
        progress = self._lease.progress if self._lease else {}
        try:
            with self._storage.engine.begin() as connection:
                connection.execute(sa.update(slots).where(*mine).values(state="open", **progress))
                connection.execute(me.values(state="left", last_seen=self._storage.now))
        except SQLAlchemyError as error:  # the others see that this process is gone
            _logger.warning("Could not sign off: %s", explain(self._storage.url, error))

    def _beat(self) -> None:
        while not self._leaving.wait(self._storage.lease_seconds / 6):
            lease = self._lease
            try:
                with self._storage.engine.begin() as connection:
                    self._renew(connection)
                    self._look_whether_open(connection)
                    if lease is not None and not self._update(connection, lease):
                        lease.lost.set()
            except SQLAlchemyError as error:  # a database that restarts must not end the heartbeat
                _logger.warning("Heartbeat failed, trying again: %s", explain(self._storage.url, error))

    def _renew(self, connection: sa.Connection) -> None:
        me = sa.update(workers).where(workers.c.id == self.id)
        connection.execute(me.values(last_seen=self._storage.now, oom_kills=num_oom_kills()))

    def _look_whether_open(self, connection: sa.Connection) -> bool:
        """Whether the study is open; where it is not, `halted` is set."""
        if study_state(connection, self._study.study_name) != "open":
            self.halted.set()
        return not self.halted.is_set()

    def _update(self, connection: sa.Connection, lease: Lease, **values: Any) -> bool:
        """Change the row of a slot; False: another worker has it."""
        owned = (self._of_study, slots.c.slot == lease.slot, slots.c.owner == self.id)
        values = {"owner": self.id, **lease.progress, **values}
        return connection.execute(sa.update(slots).where(*owned).values(values)).rowcount > 0

    # Claims

    def claim(self) -> Lease | None:
        """Claim a slot: first one whose owner died, then one with an unfinished trial, then a fresh one.

        Returns:
            None when every slot is done, with a live worker, or has a trial that cannot run here, and when
            the study is not open.
        """
        self._lease = self._storage.persist(self._claim)
        return self._lease

    def _claim(self) -> Lease | None:
        # A claim that was committed though the connection broke before the answer came.
        mine = sa.select(slots).where(self._of_study, slots.c.state == "running", slots.c.owner == self.id)
        runnable = self._runnable()
        free = (
            sa.select(slots)
            .where(self._of_study, slots.c.state == "open", runnable)
            .order_by(slots.c.trial_number.is_(None), slots.c.slot)
            .limit(1)
            .with_for_update(skip_locked=True)
        )
        while True:
            with self._storage.engine.begin() as connection:
                claimed = connection.execute(mine).first()
                if claimed is not None:
                    return Lease(claimed.slot, Deaths.of_slot(claimed), halted=self.halted)
                if not self._look_whether_open(connection):
                    return None
                found = self._abandoned(connection, runnable) or connection.execute(free).one_or_none()
                if found is None:
                    return None
                deaths = self._deaths(connection, found)
                unchanged = (
                    self._of_study,
                    slots.c.slot == found.slot,
                    slots.c.state == found.state,
                    slots.c.owner.is_not_distinct_from(found.owner),
                )
                claim = sa.update(slots).where(*unchanged)
                taken = connection.execute(claim.values(state="running", owner=self.id, **deaths.columns))
                if taken.rowcount:
                    self._renew(connection)
                    return Lease(found.slot, deaths, halted=self.halted)

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
        alive = self._storage.live_workers(connection, self._study.study_name) if rows else set()
        return next((row for row in rows if row.owner not in alive), None)

    def _deaths(self, connection: sa.Connection, slot: sa.Row[Any]) -> Deaths:
        """The deaths in a slot that is claimed, with that of its owner if that died and it counts."""
        if slot.state == "open" or slot.trial_number is None:
            return Deaths.of_slot(slot)
        owner = connection.execute(sa.select(workers).where(workers.c.id == slot.owner)).one()
        outlived = owner.id in self._alive_at_start or owner.number > self.number
        cause = counted_cause(owner, outlived=outlived)
        trial = self._study.get_trials(deepcopy=False)[slot.trial_number]
        if cause is None or "outcome" in trial.user_attrs:
            return Deaths.of_slot(slot)
        return count_death(connection, slot, trial, self.saved_step(trial.number), cause)

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
        study = self._study
        while True:
            of_slot = self._trials_of(lease.slot)
            running = [trial for trial in of_slot if trial.state == TrialState.RUNNING]
            for extra in running[1:]:  # made twice: the connection broke before the answer came
                study.tell(extra.number, state=TrialState.FAIL)
            if running and not running[0].constraints:
                self._update_slot(lease, trial_number=running[0].number)
                return optuna.trial.Trial(study, running[0]._trial_id)
            if running:  # its worker was killed between setting the constraint and the state
                study.tell(running[0].number, state=TrialState.PRUNED)
                continue
            if waiting := [trial for trial in of_slot if trial.state == TrialState.WAITING]:
                self._storage.optuna.set_trial_state_values(waiting[0]._trial_id, TrialState.RUNNING)
                continue
            failures = _failures(of_slot)
            finished = any(trial.state != TrialState.FAIL for trial in of_slot)
            if finished or not self._retries_left(of_slot):
                self._update_slot(lease, state="done")
                return None
            if not failures and self._take_enqueued(lease.slot):
                continue
            attrs: dict[str, Any] = {SLOT_ATTR: lease.slot}
            retry_of = None
            if failures:
                attrs["fixed_params"] = failures[-1].params  # as `study.enqueue_trial` stores them
                retry_of = {"retry_of": failures[-1].number}
            # Not `study.ask`: the trial must carry its slot from the moment it exists.
            study.add_trial(
                optuna.trial.create_trial(state=TrialState.RUNNING, system_attrs=attrs, user_attrs=retry_of)
            )

    def _take_enqueued(self, slot: int) -> bool:
        """Give the slot the first trial of `study.enqueue_trial` that has none; False: there is none.

        One that no worker can run ends at once and takes no slot.
        """
        if not self._enqueued():
            return False
        with exclusive(self._storage.engine):  # no two workers take the same
            for trial in self._enqueued():
                refusal = self.refusal(trial.system_attrs.get("fixed_params", {}))
                if not refusal:
                    self._storage.optuna.set_trial_system_attr(trial._trial_id, SLOT_ATTR, slot)
                    return True
                self._storage.fail_trial(trial, Outcome.FAILED, refusal)
        return False

    def _enqueued(self) -> list[FrozenTrial]:
        waiting = self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        return [trial for trial in waiting if SLOT_ATTR not in trial.system_attrs]

    def _trials_of(self, slot: int) -> list[FrozenTrial]:
        trials = self._study.get_trials(deepcopy=False)
        return [trial for trial in trials if trial.system_attrs.get(SLOT_ATTR) == slot]

    def _retries_left(self, of_slot: list[FrozenTrial]) -> bool:
        failures = _failures(of_slot)
        expected = any("traceback" not in trial.user_attrs for trial in failures)
        return not expected and len(failures) <= self.max_retries

    def _update_slot(self, lease: Lease, **values: Any) -> None:
        with self._storage.engine.begin() as connection:
            is_mine = self._update(connection, lease, **values)
            self._renew(connection)
        if not is_mine:
            lease.lost.set()
            lease.check()

    def release(self, lease: Lease) -> None:
        """Open a claimed slot again; its trial, if unfinished, goes on with the next worker."""
        self._storage.persist(lambda: self._update_slot(lease, state="open"))

    def record_outcome(self, lease: Lease, trial: optuna.trial.Trial, result: TrialResult) -> None:
        """Store how a trial ended and close its slot.

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
        attributes = trial_attributes(result)

        def store() -> None:
            self._update_slot(lease)
            if self._storage.optuna.get_trial(trial._trial_id).state.is_finished():
                return  # the connection broke before the answer came
            for key, value in attributes.items():
                trial.set_user_attr(key, json_safe(value))
            if result.outcome.infeasible and CONSTRAINT not in trial.constraints:
                trial.set_constraint(CONSTRAINT, 1.0)
            # Last, so that a trial that has a state has everything else.
            self._study.tell(trial, values, state=TrialState[result.outcome.optuna_state])

        def close() -> None:
            if result.outcome == Outcome.FAILED and self._retries_left(self._trials_of(lease.slot)):
                # Another trial, from its first step.
                self._update_slot(lease, state="open", **Deaths().columns)
            else:
                self._update_slot(lease, state="done")

        self._storage.persist(store)
        self._storage.persist(close)


def _failures(of_slot: list[FrozenTrial]) -> list[FrozenTrial]:
    return [trial for trial in of_slot if trial.user_attrs.get("outcome") == Outcome.FAILED]
