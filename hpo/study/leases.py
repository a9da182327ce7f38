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

A trial that kills its own process (out of memory, a segmentation fault) would be taken over forever. So it
keeps the names of the workers that died in it since it last got past all its evaluations.

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
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import optuna
import sqlalchemy as sa
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError

from hpo.errors import LeaseLostError
from hpo.json_safe import json_safe
from hpo.outcome import Outcome
from hpo.study.database import exclusive, explain
from hpo.study.process import is_alive, process_start, this_machine
from hpo.study.schema import evaluations, slots, worker_devices, workers
from hpo.study.storage import Storage

if TYPE_CHECKING:
    from hpo.trial.telemetry import TrialResult

_logger = logging.getLogger(__name__)

SLOT_ATTR = "hpo:slot"
DEATHS_ATTR = "hpo:deaths"
CONSTRAINT = "feasible"

MORE_DEATHS = 2
"""How many more workers may die in a trial than it may have retries: few are the trial's fault."""


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

    def __init__(self, slot: int, dead_owner: str | None = None) -> None:
        self.slot = slot
        self.dead_owner = dead_owner
        """The worker that died with the slot, if it was taken over."""
        self.num_deaths = 0
        """How many workers died in the slot's trial since it was last seen to get on; see `open_trial`."""
        self.crashed = False
        """Whether the slot's trial is to end as `crashed` instead of being run again."""
        self._lost = threading.Event()

    @property
    def lost(self) -> bool:
        """Whether another worker has the slot now."""
        return self._lost.is_set()

    def check(self) -> None:
        """To be called between steps; reads a flag only.

        Raises:
            LeaseLostError: another worker has the slot, so this one must stop and store nothing.
        """
        if self.lost:
            raise LeaseLostError(f"Another worker has taken over slot {self.slot}.")


class WorkerLease:
    """This process in a study: its row says that it lives, and a thread keeps that fresh.

    On leaving the block, a slot that is still claimed opens again. `device` is the `DeviceInfo.device_id` of
    what its trials run on, where known. `can_run` is asked for the parameters of a slot's trial, {} where it
    has none yet, before the slot is claimed.
    """

    number: int
    """Of this worker among all that the study ever had."""

    def __init__(
        self,
        storage: Storage,
        study: optuna.Study,
        *,
        max_retries: int,
        device: str | None = None,
        can_run: Callable[[Mapping[str, Any]], bool] = lambda _: True,
    ) -> None:
        host = socket.gethostname()
        self.id = f"{host[:100]}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._storage = storage
        self._study = study
        self._name = study.study_name
        self._max_retries = max_retries
        self._device = device
        self._can_run = can_run
        self._values = {
            "id": self.id,
            "study": self._name,
            "host": host,
            "machine": this_machine(),
            "pid": os.getpid(),
            "process_start": process_start(os.getpid()) or "",
            "started": storage.now,
            "last_seen": storage.now,
            "state": "live",
        }
        self._lease: Lease | None = None
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> WorkerLease:
        def action() -> None:
            of_study = sa.select(sa.func.count()).where(workers.c.study == self._name)
            with exclusive(self._storage.engine), self._storage.engine.begin() as connection:
                self.number = connection.execute(of_study).scalar_one()
                row = self._storage.insert(workers).values(**self._values)
                connection.execute(row.on_conflict_do_nothing())
                if self._device is not None:
                    place = {"worker": self.id, "device": self._device}
                    row = self._storage.insert(worker_devices).values(place)
                    connection.execute(row.on_conflict_do_nothing())

        self._storage.persist(action)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        self._thread.join()
        mine = (slots.c.study == self._name, slots.c.owner == self.id, slots.c.state == "running")
        left = {"state": "left", "last_seen": self._storage.now}
        try:
            with self._storage.engine.begin() as connection:
                connection.execute(sa.update(slots).where(*mine).values(state="open"))
                connection.execute(sa.update(workers).where(workers.c.id == self.id).values(**left))
        except SQLAlchemyError as error:  # the others see that this process is gone
            _logger.warning("Could not sign off: %s", explain(self._storage.url, error))

    def _beat(self) -> None:
        while not self._leaving.wait(self._storage.lease_seconds / 6):
            lease = self._lease
            owner = sa.select(slots.c.owner).where(
                slots.c.study == self._name, slots.c.slot == (lease.slot if lease else None)
            )
            try:
                with self._storage.engine.begin() as connection:
                    self._renew(connection)
                    if lease and connection.execute(owner).scalar() != self.id:
                        lease._lost.set()
            except SQLAlchemyError as error:  # a database that restarts must not end the heartbeat
                _logger.warning("Heartbeat failed, trying again: %s", explain(self._storage.url, error))

    def _renew(self, connection: sa.Connection) -> None:
        mine = sa.update(workers).where(workers.c.id == self.id)
        connection.execute(mine.values(last_seen=self._storage.now))

    def claim(self) -> Lease | None:
        """Claim a slot: first one whose owner died, then one with an unfinished trial, then a fresh one.

        Returns:
            None when every slot is done or with a live worker.
        """
        self._lease = self._storage.persist(self._claim)
        return self._lease

    def _claim(self) -> Lease | None:
        of_study = slots.c.study == self._name
        # A claim that was committed though the connection broke before the answer came.
        mine = sa.select(slots.c.slot).where(of_study, slots.c.state == "running", slots.c.owner == self.id)
        free = (
            sa.select(slots.c.slot, slots.c.owner, slots.c.trial_number)
            .where(of_study, slots.c.state == "open")
            .order_by(slots.c.slot)
        )
        fresh = free.where(slots.c.trial_number.is_(None)).limit(1).with_for_update(skip_locked=True)
        begun = free.where(slots.c.trial_number.is_not(None))
        while True:
            with self._storage.engine.begin() as connection:
                claimed = connection.execute(mine).scalars().first()
                if claimed is not None:
                    return Lease(int(claimed))
                found, state = self._abandoned(connection), "running"
                if found is None:
                    found, state = self._runnable(connection.execute(begun).all()), "open"
                if found is None and self._can_run({}):
                    found = connection.execute(fresh).one_or_none()
                if found is None:
                    return None
                unchanged = (
                    of_study,
                    slots.c.slot == found.slot,
                    slots.c.state == state,
                    slots.c.owner.is_not_distinct_from(found.owner),
                )
                taken = connection.execute(
                    sa.update(slots).where(*unchanged).values(state="running", owner=self.id)
                )
                if taken.rowcount:
                    self._renew(connection)
                    return Lease(int(found.slot), found.owner if state == "running" else None)

    def _abandoned(self, connection: sa.Connection) -> Any:
        rows = connection.execute(
            sa.select(
                slots.c.slot, slots.c.owner, slots.c.trial_number, workers, self._storage.now.label("now")
            )
            .join_from(slots, workers, slots.c.owner == workers.c.id, isouter=True)
            .where(slots.c.study == self._name, slots.c.state == "running")
            .order_by(slots.c.slot)
        )
        return self._runnable(row for row in rows if not is_alive(row, self._storage.lease_seconds))

    def _runnable(self, rows: Iterable[Any]) -> Any:
        """The first of the slots whose trial can run here."""
        for row in rows:
            trials = self._study.get_trials(deepcopy=False)
            if self._can_run({} if row.trial_number is None else trials[row.trial_number].params):
                return row
        return None

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
                lease.num_deaths = self._count_deaths(lease, running[0])
                lease.crashed = lease.num_deaths > self._max_retries + MORE_DEATHS
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

    def _count_deaths(self, lease: Lease, trial: optuna.trial.FrozenTrial) -> int:
        """Add the lease's dead owner to those that the trial remembers; return how many they are."""
        deaths = trial.system_attrs.get(DEATHS_ATTR, {"step": 0, "workers": []})
        if lease.dead_owner is not None and lease.dead_owner not in deaths["workers"]:
            last_step = sa.select(sa.func.max(evaluations.c.step)).where(
                evaluations.c.study == self._name, evaluations.c.trial_number == trial.number
            )
            with self._storage.engine.connect() as connection:
                step = connection.execute(last_step).scalar() or 0
            before = deaths["workers"] if step <= deaths["step"] else []
            deaths = {"step": max(step, deaths["step"]), "workers": [*before, lease.dead_owner]}
            self._storage.optuna.set_trial_system_attr(trial._trial_id, DEATHS_ATTR, deaths)
        return len(deaths["workers"])

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
            self._update_slot(lease, state="open" if retry else "done")

        self._storage.persist(action)
        self._storage.persist(close)
