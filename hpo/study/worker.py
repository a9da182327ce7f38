"""Workers: the loop that turns slots into finished trials, in this process or in several.

    claim a slot -> open its trial -> run it -> record its outcome -> next slot

Workers know of each other through the database alone, so it does not matter how many there are, where they
run and when they come or go. A worker leaves when every slot is done; that of a comparison comes back
(`hpo.study.next_look`). While others still run the last trials it waits, to take over if one of them dies.

Told to stop (`hpo.study.stopping`), a worker lets its trial write a checkpoint and leaves.
"""

from __future__ import annotations

import shutil
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import optuna
from optuna.exceptions import UpdateFinishedTrialError

from hpo.config.comparison import ComparisonConfig
from hpo.config.search_space import suggest
from hpo.config.study_config import of_deployed
from hpo.errors import HpoError, LeaseLostError, Pruned, did_you_mean
from hpo.outcome import Outcome
from hpo.precision.table import PRECISION
from hpo.study.artifact_store import ArtifactStore
from hpo.study.checkpoint_artifacts import ArtifactCheckpoints, FolderCheckpoints
from hpo.study.checkpoint_folders import kept_checkpoints
from hpo.study.database import exclusive
from hpo.study.deaths import last_saved_step
from hpo.study.device_sampler import ANY_DEVICE, WorkerDevice
from hpo.study.grid_sampler import NoPointLeft, PlannedPoints, SharedGrid
from hpo.study.leases import Lease, WorkerLease
from hpo.study.lifecycle import end_unfinished
from hpo.study.outbox import Outbox, Report
from hpo.study.samplers import build_pruner, build_sampler
from hpo.study.stopping import Stop
from hpo.study.storage import Storage
from hpo.study.study_record import EvaluationRow
from hpo.study.time_left import TimeLeft

if TYPE_CHECKING:
    from hpo.config.search_space import SearchSpace
    from hpo.config.study_config import StudyConfig
    from hpo.trial.executor import Executor
    from hpo.trial.telemetry import ScoredEvaluation, TrialResult

Execute = Callable[[optuna.trial.Trial, Lease], "TrialResult"]
"""Runs one trial. Calls `Lease.check` between steps, so that it stops when another worker has the trial."""


@dataclass(frozen=True)
class RunSummary:
    """What one call ran."""

    ended: Literal["finished", "stopped", "timeout", "elsewhere", "halted", "yielded"]
    """Every slot is done; told to stop; out of time; what remains is for other devices; the study was paused,
    cancelled or deleted; another study comes first."""
    outcomes: Mapping[str, int] = field(default_factory=Counter)
    """How many trials ended how, here. Empty for a study that was finished before."""
    elsewhere: tuple[str, ...] = ()
    """What remains needs a device with this: precisions, or its name."""

    @property
    def exit_code(self) -> int:
        """130 after a stop, else 0."""
        return 130 if self.ended == "stopped" else 0


@dataclass(frozen=True)
class Stint:
    """The time of a worker in one of the studies that it serves."""

    go_on: Callable[[bool], bool] = lambda _: True
    """Asked after each trial (True), and when there is none to run but others still run some (False)."""
    reservation: str = ""
    """See `WorkerLease`."""
    has_time: Callable[[], bool] = lambda: True
    """Asked before each trial; where there is no time for another one, the worker leaves."""


STAYS = Stint()
"""Of a worker that serves one study."""


def run_worker(
    config: StudyConfig,
    storage: Storage,
    execute: Execute,
    *,
    device: WorkerDevice = ANY_DEVICE,
    stop: threading.Event | None = None,
    after_trial: Callable[[], None] = lambda: None,
    saved_step: Callable[[int], int] = lambda _: 0,
    stint: Stint = STAYS,
    poll_seconds: float = 2.0,
) -> RunSummary:
    """Run trials of the study with `execute` until none is left for `device`, `stop` is set or time is up.

    `after_trial` is called when a trial has ended, here or with a worker that this one waited for; again if
    the database went away meanwhile.
    `saved_step` gives the step of the last checkpoint of a trial by its number.
    """
    stop = storage.stop = stop or threading.Event()
    deadline = time.monotonic() + (config.timeout or float("inf"))
    study = storage.create_or_resume_study(config, resize=False)
    study.pruner = build_pruner(config.pruner)
    skipped = frozenset(device.left_out or ()) if config.amp.on_unsupported == "skip" else frozenset()
    runnable = _Runnable(study, config.precisions, skipped)
    outcomes: Counter[str] = Counter()
    with WorkerLease(
        storage,
        study,
        max_retries=config.max_retries,
        device=device.device_id,
        can_run=runnable if skipped or config.comparison else None,
        refusal=partial(_refusal, config.search_space),
        saved_step=saved_step,
        reservation=stint.reservation,
    ) as worker:
        study.sampler = build_sampler(
            config.sampler,
            config.search_space,
            worker_number=worker.number,
            device=device,
            skipped=skipped,
            lock=partial(exclusive, storage.engine),
            read_plan=partial(read_plan, storage, config.name) if config.comparison else None,
        )
        idle = 0
        while not stop.is_set() and not worker.halted.is_set() and time.monotonic() <= deadline:
            if not stint.has_time():
                break
            lease = worker.claim()
            if lease is not None:
                idle = 0
                outcome = _run_slot(worker, lease, execute)
                if outcome is not None:
                    outcomes[outcome] += 1
                    storage.persist(after_trial)
                else:  # what is left may be for others
                    stop.wait(poll_seconds)
                if not (stop.is_set() or worker.halted.is_set() or stint.go_on(True)):
                    return RunSummary("yielded", outcomes)
                continue
            if worker.halted.is_set():
                break
            unfinished = storage.persist(worker.unfinished).values()
            others_run = config.comparison is not None and storage.persist(worker.others_run)
            waits = bool(unfinished) and others_run
            idle = 0 if waits else idle + 1
            # Between two of its trials another worker runs none for a moment.
            leaves = not waits and (idle > 1 or not unfinished or config.comparison is None)
            if leaves and not storage.persist(lambda: any(map(runnable, unfinished))):  # noqa: B023
                storage.persist(after_trial)
                elsewhere = runnable.left_to_others(unfinished)
                return RunSummary("elsewhere" if unfinished else "finished", outcomes, elsewhere)
            if not stint.go_on(False):
                return RunSummary("yielded", outcomes)
            # Others run what is left; if one of them dies, this worker takes over.
            stop.wait(min(poll_seconds, max(0.0, deadline - time.monotonic())))
    if worker.halted.is_set():
        end_unfinished(storage, config.name)  # of a cancelled study; the command may have ended before
    if stop.is_set():
        return RunSummary("stopped", outcomes)
    return RunSummary("halted" if worker.halted.is_set() else "timeout", outcomes)


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
        if isinstance(self.study.sampler, PlannedPoints):
            return self.study.sampler.can_run(self.study, params)
        possible = self._possible(params)
        return not possible or not self.skipped.issuperset(possible)

    def left_to_others(self, unfinished: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
        """What unfinished trials with these parameters need and the device lacks: precisions, or its name."""
        needed = {name for params in unfinished for name in self._possible(params)} & self.skipped
        sampler = self.study.sampler
        if not needed and isinstance(sampler, PlannedPoints):
            return tuple(f"the name {kind}" for kind in sampler.kinds_left(self.study))
        return tuple(name for name in self.precisions if name in needed)

    def _possible(self, params: Mapping[str, Any]) -> Sequence[str]:
        """The precisions that the trial may have; none where the study does not search them."""
        if PRECISION in params:
            return [params[PRECISION]]
        sampler = self.study.sampler
        return sampler.precisions_left(self.study) if isinstance(sampler, SharedGrid) else self.precisions


def _refusal(space: SearchSpace, params: Mapping[str, Any]) -> str:
    """Why no trial can have the enqueued `params`, which Optuna takes as they are; empty: one can."""
    trial = optuna.trial.FixedTrial(dict(params))
    for name in params:
        if name not in space:
            return f"it was enqueued with `{name}`, which is not searched.{did_you_mean(name, list(space))}"
        try:
            with warnings.catch_warnings(action="error"):  # of a value that is out of range
                space[name].suggest(name, trial)
        except (UserWarning, ValueError, TypeError) as error:
            return f"it was enqueued with a `{name}` that is not searched: {error}"
    return ""


def _run_slot(worker: WorkerLease, lease: Lease, execute: Execute) -> Outcome | None:
    """Run the trial of a claimed slot and return its outcome; None: there is none to run, or it is lost."""
    with suppress(LeaseLostError):
        try:
            trial = worker.open_trial(lease)
        except NoPointLeft:  # another worker was faster
            worker.release(lease)
            return None
        if trial is not None:
            result = _run_trial(trial, lease, execute)
            worker.record_outcome(lease, trial, result)
            if result.outcome != Outcome.PREEMPTED:
                lease.recorded()
            return result.outcome
    return None


def _run_trial(trial: optuna.trial.Trial, lease: Lease, execute: Execute) -> TrialResult:
    if lease.deaths.end_trial:
        return _ended(Outcome.CRASHED, lease.deaths.reason)
    try:
        return execute(trial, lease)
    except HpoError:
        raise
    except UpdateFinishedTrialError as error:
        raise LeaseLostError(f"Another worker has finished trial {trial.number}.") from error
    except Exception as error:
        return _ended(Outcome.FAILED, f"{type(error).__name__}: {error}", traceback.format_exc())


def _ended(outcome: Outcome, reason: str, trace: str | None = None) -> TrialResult:
    from hpo.trial.telemetry import TrialResult  # PyTorch, which a worker of the tests does without

    return TrialResult(outcome, reason, traceback=trace)


def trial_runner(
    executor: Executor,
    storage: Storage,
    stop: Stop,
    time_left: TimeLeft | None = None,
    *,
    shared_device: bool = False,
    artifacts: ArtifactStore | None = None,
) -> Execute:
    """Return how a trial runs for real: suggest, train with `executor`, report each evaluation.

    `shared_device` says that workers were started together on the device; others are looked for. `artifacts`
    is where its checkpoints are copied to.
    """
    from hpo.trial.objectives import values_while_training  # PyTorch, as in `_ended`

    metric_names = [objective.metric for objective in executor.study.objective]
    time_left = time_left or TimeLeft(storage, executor.study.name, stop)
    token = storage.study_token(executor.study.name)

    def execute(trial: optuna.trial.Trial, lease: Lease) -> TrialResult:
        time_left.begin()
        params = storage.persist(lambda: suggest(executor.study.search_space, trial))
        lease.store_params()

        def on_evaluation(scored: ScoredEvaluation) -> None:
            evaluation = scored.evaluation
            row = EvaluationRow(
                step=evaluation.step,
                epoch=evaluation.epoch,
                seconds=evaluation.seconds,
                metrics={**values_while_training(metric_names, scored.values), **evaluation.metrics},
                train_examples_per_second=evaluation.rates.get("train_examples_per_second"),
                train_tokens_per_second=evaluation.rates.get("train_tokens_per_second"),
                numerics=evaluation.numerics,
            )
            lease.check()
            outbox.put(Report(evaluation.index, scored.values[0], row, evaluation.budget_used >= 1))
            time_left.evaluated()
            check_pruned()

        def check_pruned() -> None:
            if (index := outbox.pruned_at()) is not None:
                raise Pruned(f"the pruner stopped it after evaluation {index}.")

        def should_stop() -> bool:
            lease.check()
            check_pruned()
            time_left.look(executor.checkpoint_seconds)
            return stop.is_set() or lease.halted.is_set()

        folder = executor.trial_folder(token, trial.number)
        place = executor.device.device_id
        shared = shared_device or storage.has_other_workers_on(place)
        resume_key = f"{token}/{trial.number}"
        saved_step = max(last_saved_step(folder), lease.saved_step)  # a shared folder may be seen late
        with Outbox(storage, trial, lease, folder, saved_step) as outbox:
            lease.recorded = outbox.remove
            if outbox.ended is not None:  # with a worker that could not record it
                outbox.finish(outbox.ended)
                return outbox.ended
            result = executor.run(
                params,
                folder,
                resume_key,
                on_evaluation,
                should_stop,
                shared_device=shared,
                mirror=FolderCheckpoints(lease)
                if artifacts is None
                else ArtifactCheckpoints(artifacts, storage, lease, trial.number, outbox.is_settled),
            )
            if executor.study.evaluation.test:
                from hpo.trial.best_model import with_test_metrics  # PyTorch, as in `_ended`

                result = with_test_metrics(executor, folder, result)
            if of_deployed(executor.study.objective):
                from hpo.deploy.objective import with_deployed_values

                result = with_deployed_values(executor, folder, result, storage.has_other_workers_on)
            outbox.finish(result)
        if result.outcome == Outcome.PREEMPTED and not lease.halted.is_set():
            stop.set()  # where another rank was told
        if not shared and storage.has_other_workers_on(place):  # it came during the trial
            device = {**result.telemetry["device"], "shared": True}
            result = replace(result, telemetry={**result.telemetry, "device": device})
        return result

    return execute


def keep_best_checkpoints(
    study: optuna.Study,
    folder: Callable[[int], Path],
    top_k: int,
    drop: Callable[[set[int]], None] = lambda _: None,
) -> None:
    """Remove the checkpoints of all finished trials but those of `kept_checkpoints`.

    `folder` gives that of a trial by its number; `drop` removes those of trials elsewhere.
    """
    kept = kept_checkpoints(study, top_k)
    finished = {trial.number for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()}
    gone = finished - kept
    for number in gone:
        if folder(number).exists():
            shutil.rmtree(folder(number), ignore_errors=True)
    drop(gone)
