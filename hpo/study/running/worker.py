"""Workers: the loop that runs the trials of a study, in this process or in several.

    claim a trial -> run it -> record its outcome -> next trial

Workers know of each other through the database alone, so they may come and go anywhere. A worker leaves when
every trial has ended, or, if it is told to stop, once its trial has a checkpoint. While others still run the
last trials it waits, to take over if one of them dies.
"""

from __future__ import annotations

import math
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import optuna
from optuna.exceptions import UpdateFinishedTrialError

from hpo.config.comparison import ComparisonConfig
from hpo.config.portfolio import portfolio
from hpo.config.search_space import refusal
from hpo.errors import DeviceLostError, HpoError, LeaseLostError
from hpo.outcome import Outcome
from hpo.study.claims.budget import StudyBudget
from hpo.study.claims.ending import end_unfinished
from hpo.study.claims.lease import Lease
from hpo.study.claims.leases import WorkerLease
from hpo.study.claims.runnable import Runnable
from hpo.study.sampling.device_sampler import ANY_DEVICE, WorkerDevice
from hpo.study.sampling.points import Point, grid_points
from hpo.study.sampling.promotion import promotion_of
from hpo.study.sampling.samplers import build_pruner, build_sampler
from hpo.study.store.storage import Storage

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
    """Every trial has ended; told to stop; out of time; the rest is for other devices; the study was paused,
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
    """Run trials of the stored study until none is left for `device`, `stop` is set or time is up."""
    stop = storage.stop = stop or threading.Event()
    deadline = min(options.deadline, time.monotonic() + (config.timeout or math.inf))
    options = replace(options, deadline=deadline)
    study = storage.load_study(config.name)
    study.pruner = build_pruner(config.pruner)
    skipped = frozenset(device.left_out or ()) if config.amp.on_unsupported == "skip" else frozenset()
    plan = config.comparison
    if plan is not None and (lacking := plan.lacking(device.kind, skipped)):
        return RunSummary("elsewhere", elsewhere=lacking)
    outcomes: Counter[str] = Counter()
    promotion = promotion_of(config.pruner, config.directions, config.num_trials)
    with WorkerLease(
        storage,
        study,
        max_retries=config.max_retries,
        device=device.device_id,
        runnable=Runnable(config.precisions, skipped),
        refusal=partial(refusal, config.search_space),
        is_planned=plan is not None,
        promotion=promotion,
        read_points=_points_of(config, storage),
        portfolio=portfolio(config),
        budget=StudyBudget(config.name, promotion) if config.budget else None,
        shares_checkpoints=config.checkpoint.location is not None,
    ) as worker:
        study.sampler = build_sampler(
            config.sampler,
            config.search_space,
            worker_number=worker.number,
            device=device,
            skipped=skipped,
            explores=promotion is not None,
        )
        if summary := _run_trials(worker, storage, run_trial, options, outcomes):
            return summary
    if worker.study_closed.is_set():
        end_unfinished(storage, config.name)  # of a cancelled study; the command may have ended before
    if stop.is_set():
        return RunSummary("stopped", outcomes)
    return RunSummary("closed" if worker.study_closed.is_set() else "timeout", outcomes)


def _points_of(config: StudyConfig, storage: Storage) -> Callable[[], Sequence[Point]] | None:
    """What reads the points of a grid, or of a comparison as it is now; None: the study has no points."""
    if config.comparison is not None:
        return lambda: read_plan(storage, config.name).points()
    if config.sampler.name != "grid":
        return None
    points = grid_points(config.search_space, config.sampler.seed)
    return lambda: points


def _run_trials(
    worker: WorkerLease,
    storage: Storage,
    run_trial: RunTrial,
    options: WorkerOptions,
    outcomes: Counter[str],
) -> RunSummary | None:
    """Run one trial after the other and count the `outcomes`; None: no more may begin."""
    stop, closed = storage.stop, worker.study_closed
    while not stop.is_set() and not closed.is_set() and time.monotonic() <= options.deadline:
        if lease := worker.claim():
            if outcome := run_claimed(worker, lease, run_trial):
                outcomes[outcome] += 1
                if worker.has_ended_trials:  # not if it has only paused
                    worker.has_ended_trials = False
                    storage.persist(options.after_trial)
        elif closed.is_set():
            break
        elif any(map(worker.runnable, worker.left)):
            # Others run these trials. If one of them dies, or lets a trial continue, this worker goes on.
            stop.wait(min(options.poll_seconds, max(0.0, options.deadline - time.monotonic())))
        else:
            storage.persist(options.after_trial)
            ended: Ended = "elsewhere" if worker.left else "finished"
            return RunSummary(ended, outcomes, worker.runnable.lacks(worker.left))
    return None


def run_claimed(worker: WorkerLease, lease: Lease, run_trial: RunTrial) -> Outcome | None:
    """Run a claimed trial and return its outcome; None: another worker has taken it over.

    If this process dies, the next claim continues from the state that remains:

        before `record_outcome`  the trial is RUNNING without a live worker: it continues from its checkpoint
        after it                 the trial has ended, has paused, or waits to be tried again

    Raises DeviceLostError if this process has lost its GPU. The trial is then free, and a death of its worker
    is counted.
    """
    with suppress(LeaseLostError):
        try:
            result = _result_of(lease, run_trial)
        except DeviceLostError:
            worker.record_death(lease)
            raise
        worker.record_outcome(lease, result)
        return result.outcome
    return None


def _result_of(lease: Lease, run_trial: RunTrial) -> TrialResult:
    if lease.crash:
        return _ended(Outcome.CRASHED, lease.crash)
    try:
        return run_trial(lease.trial, lease)
    except HpoError:
        raise
    except UpdateFinishedTrialError as error:
        raise LeaseLostError(f"Somebody else has ended trial {lease.number}.") from error
    except Exception as error:
        return _ended(Outcome.FAILED, f"{type(error).__name__}: {error}", traceback.format_exc())


def _ended(outcome: Outcome, reason: str, trace: str | None = None) -> TrialResult:
    from hpo.trial.telemetry import TrialResult  # PyTorch, which a worker of the tests does without

    return TrialResult(outcome, reason, traceback=trace)


def read_plan(storage: Storage, name: str) -> ComparisonConfig:
    """The plan of a comparison as it is now."""
    return ComparisonConfig.model_validate(storage.read_definition(name)["comparison"])
