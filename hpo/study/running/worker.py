"""Workers: the loop that turns slots into finished trials, in this process or in several.

    claim a slot -> open its trial -> run it -> record its outcome -> next slot

Workers know of each other through the database alone, so they may come and go anywhere. A worker leaves when
every slot is done, or, if it is told to stop, once its trial has a checkpoint. While others still run the
last trials it waits, to take over if one of them dies.
"""

from __future__ import annotations

import math
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import optuna
from optuna.exceptions import UpdateFinishedTrialError

from hpo.config.comparison import ComparisonConfig
from hpo.config.search_space import refusal
from hpo.errors import DeviceLostError, HpoError, LeaseLostError
from hpo.outcome import Outcome
from hpo.precision.table import PRECISION, named_choices
from hpo.study.claims.budget import StudyBudget
from hpo.study.claims.lease import BUDGET_SPENT, Lease
from hpo.study.claims.leases import WorkerLease
from hpo.study.sampling.device_sampler import ANY_DEVICE, WorkerDevice
from hpo.study.sampling.grid_sampler import NoPointLeft, PlannedPoints, SharedGrid
from hpo.study.sampling.promotion import promotion_of
from hpo.study.sampling.samplers import build_pruner, build_sampler
from hpo.study.store.lifecycle import end_unfinished
from hpo.study.store.storage import Storage
from hpo.study.store.studies import create_or_resume_study

if TYPE_CHECKING:
    from hpo.config.study_config import StudyConfig
    from hpo.trial.telemetry import TrialResult

RunTrial = Callable[[optuna.trial.Trial, Lease], "TrialResult"]
"""Runs one trial. Calls `Lease.check` between steps, so that it stops when another worker has the trial."""


Ended = Literal["finished", "stopped", "timeout", "elsewhere", "closed"]


@dataclass(frozen=True)
class RunSummary:
    """What one call ran."""

    ended: Ended
    """Every slot is done; told to stop; out of time; what remains is for other devices; the study was paused,
    cancelled or deleted."""
    outcomes: Mapping[str, int] = field(default_factory=Counter)
    """How many trials ended how, here. Empty for a study that was finished before."""
    elsewhere: tuple[str, ...] = ()
    """What remains needs a device with this: precisions, or its name."""

    @property
    def num_failed(self) -> int:
        """Number of trials that failed or crashed."""
        return self.outcomes.get(Outcome.FAILED, 0) + self.outcomes.get(Outcome.CRASHED, 0)

    @property
    def mostly_failed(self) -> bool:
        """Whether more than half of the trials failed: then something other than the trials is wrong."""
        return 2 * self.num_failed > sum(self.outcomes.values())

    @property
    def exit_code(self) -> int:
        """130 after a stop, 1 if most trials failed, else 0."""
        return 130 if self.ended == "stopped" else int(self.mostly_failed)


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker is told and asked beside its study."""

    deadline: float = math.inf
    """No trial begins after this, by the monotonic clock; nor after the study's `timeout`."""
    after_trial: Callable[[], None] = lambda: None
    """Called when a trial has ended, here or with a worker that this one waited for; again if the database
    went away meanwhile."""
    poll_seconds: float = 2.0


def run_worker(
    config: StudyConfig,
    storage: Storage,
    run_trial: RunTrial,
    options: WorkerOptions = WorkerOptions(),
    *,
    device: WorkerDevice = ANY_DEVICE,
    stop: threading.Event | None = None,
) -> RunSummary:
    """Run trials of the study until none is left for `device`, `stop` is set or time is up."""
    stop = storage.stop = stop or threading.Event()
    deadline = min(options.deadline, time.monotonic() + (config.timeout or math.inf))
    options = replace(options, deadline=deadline)
    study = create_or_resume_study(storage, config, resize=False)
    study.pruner = build_pruner(config.pruner)
    skipped = frozenset(device.left_out or ()) if config.amp.on_unsupported == "skip" else frozenset()
    plan = config.comparison
    if plan is not None and (lacking := plan.lacking(device.kind, skipped)):
        return RunSummary("elsewhere", elsewhere=lacking)
    runnable = _Runnable(study, config.precisions, skipped)
    outcomes: Counter[str] = Counter()
    promotion = promotion_of(config.pruner, config.directions, config.num_slots)
    with WorkerLease(
        storage,
        study,
        max_retries=config.max_retries,
        device=device.device_id,
        can_run=runnable if skipped else None,
        refusal=partial(refusal, {} if plan else config.search_space),
        promotion=promotion,
        budget=StudyBudget(config.name, promotion) if config.budget else None,
    ) as worker:
        if plan is None:
            study.sampler = build_sampler(
                config.sampler,
                config.search_space,
                worker_number=worker.number,
                device=device,
                skipped=skipped,
                lock=storage.exclusive,
                explores=promotion is not None,
            )
        else:
            study.sampler = PlannedPoints(partial(read_plan, storage, config.name), storage.exclusive)
        if summary := _run_slots(worker, storage, runnable, run_trial, options, outcomes):
            return summary
    if worker.study_closed.is_set():
        end_unfinished(storage, config.name)  # of a cancelled study; the command may have ended before
    if stop.is_set():
        return RunSummary("stopped", outcomes)
    return RunSummary("closed" if worker.study_closed.is_set() else "timeout", outcomes)


def _run_slots(
    worker: WorkerLease,
    storage: Storage,
    runnable: _Runnable,
    run_trial: RunTrial,
    options: WorkerOptions,
    outcomes: Counter[str],
) -> RunSummary | None:
    """Run one slot after the other and count the `outcomes`; None: no more may begin."""
    stop, closed = storage.stop, worker.study_closed
    while not stop.is_set() and not closed.is_set() and time.monotonic() <= options.deadline:
        if lease := worker.claim():
            if outcome := run_slot(worker, lease, run_trial):
                outcomes[outcome] += 1
                storage.persist(options.after_trial)
            else:  # what is left may be for others
                stop.wait(options.poll_seconds)
        elif closed.is_set():
            break
        else:
            unfinished = list(storage.persist(worker.unfinished).values())
            if not storage.persist(lambda: any(map(runnable, unfinished))):  # noqa: B023
                storage.persist(options.after_trial)
                ended: Ended = "elsewhere" if unfinished else "finished"
                return RunSummary(ended, outcomes, runnable.left_to_others(unfinished))
            # Others run what is left; if one of them dies, this worker takes over.
            stop.wait(min(options.poll_seconds, max(0.0, options.deadline - time.monotonic())))
    return None


def run_slot(worker: WorkerLease, lease: Lease, run_trial: RunTrial) -> Outcome | None:
    """Run the trial of a claimed slot and return its outcome; None: there is none to run, or it is lost.

    Where this process dies, the next claim goes on from what the slot and its last trial say then:

        before `open_trial`      no trial: a trial is made
        before `record_outcome`  one that is RUNNING: it goes on from its last checkpoint
        after it                 one that has ended: the slot is done, or a retry is made

    Raises DeviceLostError if this process has lost its GPU. The slot is then open again, and a death of its
    worker is counted.
    """
    with suppress(LeaseLostError):
        try:
            trial = worker.open_trial(lease)
        except NoPointLeft:  # another worker was faster
            worker.release(lease)
            return None
        if trial is None:
            return None
        try:
            result = _result_of(trial, lease, run_trial)
        except DeviceLostError:
            worker.record_death(lease)
            raise
        worker.record_outcome(lease, trial, result)
        return result.outcome
    return None


def _result_of(trial: optuna.trial.Trial, lease: Lease, run_trial: RunTrial) -> TrialResult:
    if lease.crash:
        return _ended(Outcome.CRASHED, lease.crash)
    if lease.is_budget_spent():
        return _ended(Outcome.PRUNED, BUDGET_SPENT)
    try:
        return run_trial(trial, lease)
    except HpoError:
        raise
    except UpdateFinishedTrialError as error:
        raise LeaseLostError(f"Another worker has finished trial {trial.number}.") from error
    except Exception as error:
        return _ended(Outcome.FAILED, f"{type(error).__name__}: {error}", traceback.format_exc())


def _ended(outcome: Outcome, reason: str, trace: str | None = None) -> TrialResult:
    from hpo.trial.telemetry import TrialResult  # PyTorch, which a worker of the tests does without

    return TrialResult(outcome, reason, traceback=trace)


def read_plan(storage: Storage, name: str) -> ComparisonConfig:
    """The plan of a comparison as it is now."""
    return ComparisonConfig.model_validate(storage.read_definition(name)["comparison"])


@dataclass(frozen=True)
class _Runnable:
    """Whether a worker whose device lacks the precisions `skipped` can run a trial."""

    study: optuna.Study
    precisions: Sequence[str]
    skipped: frozenset[str]

    def __call__(self, params: Mapping[str, Any]) -> bool:
        """`params` are those that the trial has so far."""
        return any(self.skipped.isdisjoint(names) for names in self._possible(params))

    def left_to_others(self, unfinished: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
        """What unfinished trials with these parameters need and the device lacks."""
        possible = (names for params in unfinished for names in self._possible(params))
        needed = self.skipped & {name for names in possible for name in names}
        return (
            *(name for name in self.precisions if name in needed),
            *sorted(needed.difference(self.precisions)),
        )

    def _possible(self, params: Mapping[str, Any]) -> Sequence[Sequence[str]]:
        """What the trial may need of a device, one of these lists by `named_choices`."""
        own, sampler = named_choices(params), self.study.sampler
        if not own and isinstance(sampler, SharedGrid):
            return [named_choices(point) for point in sampler.points_left(self.study)]
        if PRECISION in params or not self.precisions:
            return [own]
        return [[name, *own] for name in self.precisions]
