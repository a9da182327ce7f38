"""Which trial a worker runs next, and what becomes of it when the worker dies.

A *slot* is one logical trial, and a study has exactly `n_trials` of them. A worker claims a slot, runs the
slot's Optuna trial and closes the slot. Every Optuna trial carries the number of its slot from the moment
it exists, so wherever a worker was killed, what to do follows from the slot's trials:

    no trial              -> make one
    one that is RUNNING   -> it goes on, with its number, its parameters and its checkpoint
    the last one FAILed   -> make one with the same parameters, until the retries are used up; but only
                             after an unexpected exception, because a failure that was decided (no
                             traceback) would be decided again
    anything else         -> the slot is done

A worker that dies leaves its slot claimed. On the same machine the others see at once that its process is
gone; elsewhere its lease runs out. Leases are ours because Optuna's heartbeat runs only inside
`study.optimize`, ends for good when the database restarts, and fails a trial instead of continuing it.

Whether a worker's death counts against its trial's configuration is decided in `deaths`, by the worker that
takes the slot over, in the transaction in which it does so.

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
from typing import TYPE_CHECKING, Any

import optuna
import sqlalchemy as sa
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError

from hpo.errors import LeaseLostError
from hpo.json_safe import json_safe
from hpo.outcome import Outcome
from hpo.study.database import exclusive, explain
from hpo.study.deaths import MAX_DEATHS, counted_cause, num_oom_kills
from hpo.study.process import process_start, this_machine
from hpo.study.samplers import known_params
from hpo.study.schema import evaluations, slots, workers
from hpo.study.storage import Storage

if TYPE_CHECKING:
    from hpo.trial.telemetry import TrialResult

_logger = logging.getLogger(__name__)

SLOT_ATTR = "hpo:slot"
CONSTRAINT = "feasible"
_UNTRAINED = (Outcome.UNSUPPORTED, Outcome.INCOMPATIBLE, Outcome.FAILED, Outcome.PREEMPTED)
"""Outcomes of trials that may have ended before their first step."""


def trial_attributes(result: TrialResult) -> dict[str, Any]:
    """The user attributes of a trial that ended as `result`: scalars, and the telemetry as one document."""
    attributes: dict[str, Any] = {
        "outcome": result.outcome,
        "outcome_reason": result.reason,
        **result.headline,
        "telemetry": result.telemetry,
    }
    return attributes | ({"traceback": result.traceback} if result.traceback else {})


def _failures(of_slot: list[optuna.trial.FrozenTrial]) -> list[optuna.trial.FrozenTrial]:
    return [trial for trial in of_slot if trial.user_attrs.get("outcome") == Outcome.FAILED]


class Lease:
    """The right of one worker to run one slot's trial."""

    def __init__(
        self, slot: int, num_deaths: int = 0, death_step: int = 0, death_params: int = 0, cause: str = ""
    ) -> None:
        self.slot = slot
        self.trained = False
        """Whether `check` was called: the trial has made a step."""
        self.num_deaths = num_deaths
        """How many deaths in the slot's trial count against its configuration; see `deaths`."""
        self.death_step = death_step
        """From where the trial would go on after the last of them."""
        self.death_params = death_params
        """How many parameters the trial had then."""
        self._cause = cause
        self._lost = threading.Event()

    @property
    def crashed(self) -> bool:
        """Whether the slot's trial is to end as `crashed`, because its process died again at one place."""
        return self.num_deaths >= MAX_DEATHS

    @property
    def crash_reason(self) -> str:
        """How often the trial's process died, where and, if this worker saw it, why."""
        where = f"after step {self.death_step}" if self.death_step else "before its first checkpoint"
        why = f" (the last time: {self._cause})" if self._cause else ""
        return f"its process died {self.num_deaths} times {where}, without progress{why}."

    @property
    def lost(self) -> bool:
        """Whether another worker has the slot now."""
        return self._lost.is_set()

    def check(self) -> None:
        """To be called between steps; reads a flag only.

        Raises:
            LeaseLostError: another worker has the slot, so this one must stop and store nothing.
        """
        self.trained = True
        if self.lost:
            raise LeaseLostError(f"Another worker has taken over slot {self.slot}.")


def _lease_of(slot: Any) -> Lease:
    return Lease(slot.slot, slot.deaths, slot.death_step, slot.death_params)


class WorkerLease:
    """This process in a study: its row says that it lives, and a thread keeps that fresh.

    On leaving the block, a slot that is still claimed opens again.

    Args:
        max_retries: how often a trial that failed unexpectedly is tried again.
        device: the `DeviceInfo.device_id` of what its trials run on, where known.
        can_run: whether this worker can run a trial with these parameters, perhaps not yet all, and {} for
            one that is not made yet; it leaves the others to other workers.
        saved_step: the step of the last checkpoint of the trial with this number.
    """

    number: int
    """Of the worker in the study, from 0; no other worker of the study ever has it."""

    def __init__(
        self,
        storage: Storage,
        study: optuna.Study,
        *,
        max_retries: int,
        device: str | None = None,
        can_run: Callable[[Mapping[str, Any]], bool] | None = None,
        saved_step: Callable[[int], int] = lambda _: 0,
    ) -> None:
        host = socket.gethostname()
        self.id = f"{host[:100]}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._storage = storage
        self._study = study
        self._name = study.study_name
        self._max_retries = max_retries
        self._can_run = can_run
        self._saved_step = saved_step
        self._values = {
            "id": self.id,
            "study": self._name,
            "host": host,
            "machine": this_machine(),
            "pid": os.getpid(),
            "process_start": process_start(os.getpid()) or "",
            "device": device,
            "started": storage.now,
            "last_seen": storage.now,
            "oom_kills": num_oom_kills(),
            "state": "live",
        }
        self._alive_at_start: set[str] = set()
        self._lease: Lease | None = None
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> WorkerLease:
        self._storage.persist(self._register)
        self._thread.start()
        return self

    def _register(self) -> None:
        """Add this worker's row, with the next number; the data cannot be exchanged at the same time."""
        numbers = sa.select(workers.c.id, workers.c.number).where(workers.c.study == self._name)
        with exclusive(self._storage.engine):
            self._storage.check_data(self._name)
            with self._storage.engine.begin() as connection:
                given = {row.id: row.number for row in connection.execute(numbers)}
                self._alive_at_start = self._storage.live_workers(connection, self._name) - {self.id}
                if self.id in given:  # the connection broke before the answer came
                    self.number = given[self.id]
                    return
                self.number = 1 + max(given.values(), default=-1)
                connection.execute(sa.insert(workers).values(**self._values, number=self.number))

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        self._thread.join()
        mine = (slots.c.study == self._name, slots.c.owner == self.id, slots.c.state == "running")
        left = {"state": "left", "last_seen": self._storage.now}
        try:
            with self._storage.engine.begin() as connection:
                connection.execute(sa.update(slots).where(*mine).values(state="open", **self._trained()))
                connection.execute(sa.update(workers).where(workers.c.id == self.id).values(**left))
        except SQLAlchemyError as error:  # the others see that this process is gone
            _logger.warning("Could not sign off: %s", explain(self._storage.url, error))

    def _beat(self) -> None:
        told: Lease | None = None
        while not self._leaving.wait(self._storage.lease_seconds / 6):
            lease = self._lease
            slot = sa.and_(slots.c.study == self._name, slots.c.slot == (lease.slot if lease else None))
            try:
                with self._storage.engine.begin() as connection:
                    self._renew(connection)
                    if lease and connection.execute(sa.select(slots.c.owner).where(slot)).scalar() != self.id:
                        lease._lost.set()
                    elif lease and lease.trained and lease is not told:
                        mine = sa.update(slots).where(slot, slots.c.owner == self.id)
                        connection.execute(mine.values(trained=True))
                        told = lease
            except SQLAlchemyError as error:  # a database that restarts must not end the heartbeat
                _logger.warning("Heartbeat failed, trying again: %s", explain(self._storage.url, error))

    def _renew(self, connection: sa.Connection) -> None:
        mine = sa.update(workers).where(workers.c.id == self.id)
        connection.execute(mine.values(last_seen=self._storage.now, oom_kills=num_oom_kills()))

    def _trained(self) -> dict[str, bool]:
        return {"trained": True} if self._lease is not None and self._lease.trained else {}

    def claim(self) -> Lease | None:
        """Claim a slot: first one whose owner died, then one with an unfinished trial, then a fresh one.

        Returns:
            None when every slot is done, with a live worker, or has a trial that cannot run here.
        """
        self._lease = self._storage.persist(self._claim)
        return self._lease

    def _claim(self) -> Lease | None:
        of_study = slots.c.study == self._name
        # A claim that was committed though the connection broke before the answer came.
        mine = sa.select(slots).where(of_study, slots.c.state == "running", slots.c.owner == self.id)
        runnable = self._runnable()
        free = (
            sa.select(slots)
            .where(of_study, slots.c.state == "open", runnable)
            .order_by(slots.c.trial_number.is_(None), slots.c.slot)
            .limit(1)
            .with_for_update(skip_locked=True)
        )
        while True:
            with self._storage.engine.begin() as connection:
                claimed = connection.execute(mine).first()
                if claimed is not None:
                    return _lease_of(claimed)
                found = self._abandoned(connection, runnable) or connection.execute(free).one_or_none()
                if found is None:
                    return None
                died = found.state == "running"
                lease = self._count_death(connection, found) if died else _lease_of(found)
                deaths = {
                    "deaths": lease.num_deaths,
                    "death_step": lease.death_step,
                    "death_params": lease.death_params,
                }
                unchanged = (
                    of_study,
                    slots.c.slot == found.slot,
                    slots.c.state == found.state,
                    slots.c.owner.is_not_distinct_from(found.owner),
                )
                taken = connection.execute(
                    sa.update(slots).where(*unchanged).values(state="running", owner=self.id, **deaths)
                )
                if taken.rowcount:
                    self._renew(connection)
                    return lease

    def _runnable(self) -> sa.ColumnElement[bool]:
        """The condition that this worker can run the trial of a slot, or begin one where there is none."""
        if self._can_run is None:
            return sa.true()
        unfinished = sa.select(slots.c.slot, slots.c.trial_number).where(
            slots.c.study == self._name, slots.c.state != "done", slots.c.trial_number.is_not(None)
        )
        with self._storage.engine.connect() as connection:
            rows = connection.execute(unfinished).all()
        trials = self._study.get_trials(deepcopy=False) if rows else []
        params = {trial.number: known_params(trial) for trial in trials}
        refused = [row.slot for row in rows if not self._can_run(params.get(row.trial_number, {}))]
        others = slots.c.slot.not_in(refused)
        return others if self._can_run({}) else sa.and_(others, slots.c.trial_number.is_not(None))

    def _abandoned(self, connection: sa.Connection, runnable: sa.ColumnElement[bool]) -> Any:
        query = sa.select(slots).where(slots.c.study == self._name, slots.c.state == "running", runnable)
        rows = connection.execute(query.order_by(slots.c.slot)).all()
        alive = self._storage.live_workers(connection, self._name) if rows else set()
        return next((row for row in rows if row.owner not in alive), None)

    def _count_death(self, connection: sa.Connection, slot: Any) -> Lease:
        """Return the lease of a slot whose owner died, with that death if it counts."""
        lease = _lease_of(slot)
        dead = connection.execute(sa.select(workers).where(workers.c.id == slot.owner)).one_or_none()
        if dead is None or slot.trial_number is None:
            return lease
        outlived = dead.id in self._alive_at_start or dead.number > self.number
        cause = counted_cause(dead, outlived=outlived)
        trial = self._study.get_trials(deepcopy=False)[slot.trial_number]
        if cause is None or "outcome" in trial.user_attrs:
            return lease
        last_evaluation = sa.select(sa.func.max(evaluations.c.step)).where(
            evaluations.c.study == self._name, evaluations.c.trial_number == trial.number
        )
        step = max(connection.execute(last_evaluation).scalar() or 0, self._saved_step(trial.number))
        has_progress = step > lease.death_step or len(trial.params) > lease.death_params
        num_deaths = 1 if has_progress else lease.num_deaths + 1
        return Lease(slot.slot, num_deaths, max(step, lease.death_step), len(trial.params), cause)

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
            failures = _failures(of_slot)
            finished = any(trial.state != TrialState.FAIL for trial in of_slot)
            if finished or not self._retries_left(of_slot):
                self._update_slot(lease, state="done")
                return None
            attrs: dict[str, Any] = {SLOT_ATTR: lease.slot}
            retry_of = None
            if failures:
                attrs["fixed_params"] = failures[-1].params  # as `study.enqueue_trial` stores them
                retry_of = {"retry_of": failures[-1].number}
            # Not `study.ask`: the trial must carry its slot from the moment it exists.
            study.add_trial(
                optuna.trial.create_trial(state=TrialState.RUNNING, system_attrs=attrs, user_attrs=retry_of)
            )

    def _trials_of(self, slot: int) -> list[optuna.trial.FrozenTrial]:
        trials = self._study.get_trials(deepcopy=False)
        return [trial for trial in trials if trial.system_attrs.get(SLOT_ATTR) == slot]

    def _retries_left(self, of_slot: list[optuna.trial.FrozenTrial]) -> bool:
        failures = _failures(of_slot)
        expected = any("traceback" not in trial.user_attrs for trial in failures)
        return not expected and len(failures) <= self._max_retries

    def _update_slot(self, lease: Lease, **values: Any) -> None:
        owned = (slots.c.study == self._name, slots.c.slot == lease.slot, slots.c.owner == self.id)
        with self._storage.engine.begin() as connection:
            changed = connection.execute(sa.update(slots).where(*owned).values(values or {"owner": self.id}))
            self._renew(connection)
        if not changed.rowcount:
            lease._lost.set()
            lease.check()

    def release(self, lease: Lease) -> None:
        """Open a claimed slot again; its trial, if unfinished, goes on with the next worker."""
        self._storage.persist(lambda: self._update_slot(lease, state="open", **self._trained()))

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

        def action() -> None:
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
            retry = result.outcome == Outcome.FAILED and self._retries_left(self._trials_of(lease.slot))
            changes: dict[str, Any] = (
                {"trained": True} if result.outcome not in _UNTRAINED else dict(self._trained())
            )
            if retry:  # another trial, from its first step
                changes |= {"deaths": 0, "death_step": 0, "death_params": 0}
            self._update_slot(lease, state="open" if retry else "done", **changes)

        self._storage.persist(action)
        self._storage.persist(close)
