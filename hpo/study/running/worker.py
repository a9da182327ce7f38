"""A worker: claim a trial -> run it -> report its evaluations -> record its end -> next trial.

Workers know of each other through the database alone, so they may come and go anywhere. A worker leaves when
every trial has ended or, if it is told to stop, once its trial has a checkpoint. While others still run the
last trials it waits, to take over if one of them dies.
"""

import math
import os
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError

from hpo.config.comparison import ComparisonConfig
from hpo.config.limits import ENERGY
from hpo.config.portfolio import portfolio
from hpo.config.search_space import refusal, suggest
from hpo.config.study_config import StudyConfig
from hpo.device import memory_limit
from hpo.errors import DeviceLostError, HpoError, LeaseLostError, Paused, Pruned
from hpo.json_safe import is_number
from hpo.lost_device import lost_device_raised
from hpo.outcome import Outcome, Progress, TrialResult
from hpo.study.checkpoints.checkpoint_folders import FolderCheckpoints, note_database
from hpo.study.checkpoints.keep_best import keep_best_checkpoints
from hpo.study.checkpoints.remote_store import RemoteCheckpoints, RemoteStore, open_remote_store
from hpo.study.claims.budget import StudyBudget
from hpo.study.claims.ending import end_unfinished
from hpo.study.claims.lease import Lease
from hpo.study.claims.leases import WorkerLease
from hpo.study.claims.snapshot import Runnable
from hpo.study.reading.detailed_evaluations import store_row_statistics
from hpo.study.reading.watch import StudyWatch, outcome_of
from hpo.study.running.final_evaluation import evaluate_best
from hpo.study.running.open_study import OpenStudy
from hpo.study.running.stopping import WORKERS_ON_DEVICE, Pace, RunSummary, Stop
from hpo.study.running.supervisor import WorkerProcesses, run_workers
from hpo.study.sampling.device_sampler import ANY_DEVICE, WorkerDevice
from hpo.study.sampling.points import Point, grid_points
from hpo.study.sampling.promotion import RESUMED_ATTR, WHOLE_ATTR, promotion_of
from hpo.study.sampling.samplers import build_pruner, build_sampler
from hpo.study.sampling.start_up import start_up
from hpo.study.store.schema import EvaluationRow
from hpo.study.store.storage import Storage
from hpo.study.store.studies import BUDGET_SPENT, bind_data
from hpo.training.evaluate import Evaluation
from hpo.trial.best_model import with_scores
from hpo.trial.compat import checked_on
from hpo.trial.executor import Executor
from hpo.trial.telemetry import Callbacks

RunTrial = Callable[[optuna.trial.Trial, Lease], TrialResult]
"""Runs one trial. It calls `Lease.check` between steps, to stop when another worker has the trial."""


@dataclass(frozen=True)
class WorkerOptions:
    deadline: float = math.inf
    """No trial begins after this time of the monotonic clock, or after the study's `timeout`."""
    after_trial: Callable[[], None] = lambda: None
    """Called after the end of a trial, here or on another worker. It may be called twice."""
    poll_seconds: float = 2.0


def run_study(
    study: OpenStudy, processes: WorkerProcesses | None = None, *, stop: Stop | None = None
) -> RunSummary:
    """Run the study's trials on this machine until its budget is used up or `stop` is set.

    `processes` run the trials, or this process if None. Raises StudyChangedError for other data, InputError,
    and RunError if the workers ended before the study did.
    """
    stop = stop or Stop()
    if study.stored.state != "open":
        return RunSummary("closed")
    if study.stored.counts["done"] == study.config.n_trials:
        return RunSummary("finished")
    stop.can_checkpoint = True
    try:
        if study.executor is not None:
            return _work(study, study.executor, stop)
        assert processes is not None
        summary = run_workers(study.config, study.storage, study.runs_dir, processes, stop)
    finally:
        stop.can_checkpoint = False
    if summary.ended != "elsewhere":
        return summary
    return replace(summary, elsewhere=tuple(study.left_out) or study.config.precisions)


def _work(study: OpenStudy, executor: Executor, stop: Stop) -> RunSummary:
    """Be a worker in this process. It evaluates the best trial in detail when the study has ended."""
    config, storage = study.config, study.storage
    bind_data(storage, config.name, executor.fingerprint)
    folder = partial(executor.trial_folder, storage.study_token(config.name))
    study_folder = folder(0).parent
    note_database(study_folder, storage)
    remote, removed = open_remote_store(config.checkpoint), set[int]()
    stored, top_k = storage.load_study(config.name), config.checkpoint.top_k
    keep_best = partial(keep_best_checkpoints, stored, study_folder, top_k, remote, removed)
    watch = StudyWatch(storage, config, own=True)
    summary = run_worker(
        config,
        storage,
        TrialRunner(executor, storage, stop, remote=remote),
        WorkerOptions(stop.deadline, keep_best),
        device=WorkerDevice(
            executor.device.device_id,
            memory_limit(executor.device, executor.amp.memory_fraction),
            study.lacking,
            executor.device.kind,
            checked_on(executor.device),
        ),
        stop=stop,
    )
    if summary.ended == "finished" and config.comparison is None:
        evaluate_best(executor, storage, folder, stop, remote)
    return replace(summary, outcomes=Counter(map(outcome_of, watch.read().ended)))


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
        start_values=start_up(config, device).values,
        budget=StudyBudget(config.name, promotion) if config.budget else None,
        shares_checkpoints=config.checkpoint.location is not None,
    ) as worker:
        study.sampler = build_sampler(
            config.drawing_sampler,
            config.search_space,
            worker_number=worker.number,
            device=device,
            skipped=skipped,
            explores=promotion is not None,
        )
        options = replace(options, deadline=deadline)
        if summary := _run_trials(worker, storage, run_trial, options, outcomes):
            return summary
    if worker.study_closed.is_set():
        end_unfinished(storage, config.name)  # of a cancelled study; the command may have ended before
    if stop.is_set():
        return RunSummary("stopped", outcomes)
    return RunSummary("closed" if worker.study_closed.is_set() else "timeout", outcomes)


def _points_of(config: StudyConfig, storage: Storage) -> Callable[[], Sequence[Point]] | None:
    if config.comparison is not None:  # its plan grows
        return lambda: ComparisonConfig.model_validate(
            storage.read_definition(config.name)["comparison"]
        ).points()
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
    """Claim and run one trial after the other, and count the `outcomes`; None: no more may begin.

    If this process dies, the next claim continues from the state that remains:

        before `record_outcome`  the trial is RUNNING without a live worker: it continues from its checkpoint
        after it                 the trial has ended, has paused, or waits to be tried again
    """
    stop, closed = storage.stop, worker.study_closed
    while not stop.is_set() and not closed.is_set() and time.monotonic() <= options.deadline:
        if lease := worker.claim():
            with suppress(LeaseLostError):  # another worker has taken over the trial
                result = _run_claimed(worker, lease, run_trial)  # reports each evaluation
                worker.record_outcome(lease, result)
                outcomes[result.outcome] += 1
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
            lacking = worker.runnable.lacks(worker.left)
            return RunSummary("elsewhere" if worker.left else "finished", outcomes, lacking)
    return None


def _run_claimed(worker: WorkerLease, lease: Lease, run_trial: RunTrial) -> TrialResult:
    """Run a claimed trial to its result. Raises DeviceLostError if this process has lost its GPU."""
    if lease.crash:
        return TrialResult(Outcome.CRASHED, lease.crash)
    try:
        return run_trial(lease.trial, lease)
    except DeviceLostError:
        worker.record_death(lease)
        raise
    except HpoError:
        raise
    except UpdateFinishedTrialError as error:
        raise LeaseLostError(f"Somebody else has ended trial {lease.number}.") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return TrialResult(Outcome.FAILED, reason, traceback=traceback.format_exc())


class TrialRunner:
    """Runs claimed trials with `executor` in this process, and uploads checkpoints to `remote`, if any.

    A trial waits in each report until the database answers. Its evaluations are therefore stored before the
    checkpoint from which it may continue.
    """

    def __init__(
        self, executor: Executor, storage: Storage, stop: Stop, *, remote: RemoteStore | None = None
    ) -> None:
        self.pace = Pace(stop, executor.study.stall_seconds, lambda: storage.availability.is_away)
        self._executor = executor
        self._storage = storage
        self._stop = stop
        self._remote = remote
        self._shares_device = int(os.environ.get(WORKERS_ON_DEVICE, "1")) > 1
        self._checkpoint_seconds = 0.0
        self._metrics = [objective.metric for objective in executor.study.objective]
        self._token = storage.study_token(executor.study.name)

    def __call__(self, trial: optuna.trial.Trial, lease: Lease) -> TrialResult:
        """Run a claimed trial to its outcome. Raises an error that concerns more than this trial."""
        executor, storage, device = self._executor, self._storage, self._executor.device.device_id
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # a range has grown meanwhile
            params = storage.persist(lambda: suggest(executor.study.search_space, trial))
        lease.store_params()
        folder = executor.trial_folder(self._token, trial.number)
        shared = self._shares_device or bool(storage.other_workers_on(device))
        mirror = (
            RemoteCheckpoints(self._remote, lease, folder, self._stop)
            if self._remote
            else FolderCheckpoints(lease)
        )
        callbacks = Callbacks(
            partial(self._report, lease, trial.user_attrs),
            partial(self._should_stop, lease),
            partial(self._note_progress, lease),
            partial(storage.other_workers_on, device),
        )
        key = f"{self._token}/{trial.number}"
        with self.pace.trial():
            result = executor.run(params, folder, key, callbacks, shared_device=shared, mirror=mirror)
        with lost_device_raised(executor.device):
            result = self._with_scores(trial, lease, folder, result)
        if result.outcome == Outcome.PREEMPTED and not lease.study_closed.is_set():
            self._stop.set()  # another rank of this trial was told to stop
        if not shared and storage.other_workers_on(device):  # it joined during the trial
            result = with_shared_device(result, executor.study.named_metrics)
        return result

    def _report(self, lease: Lease, attributes: Mapping[str, Any], evaluation: Evaluation) -> None:
        """Store an evaluation. Raises Pruned if the pruner stops the trial, Paused if it pauses."""
        row = EvaluationRow(
            step=evaluation.step,
            epoch=evaluation.epoch,
            seconds=evaluation.seconds,
            metrics={**dict(zip(self._metrics, evaluation.values, strict=True)), **evaluation.metrics},
            train_examples_per_second=evaluation.rates.get("train_examples_per_second"),
            train_tokens_per_second=evaluation.rates.get("train_tokens_per_second"),
        )
        lease.check()
        with self.pace.reporting():
            is_pruned = lease.report(row, evaluation.index, evaluation.values[0])
        if evaluation.is_last:
            return
        whole = attributes.get(WHOLE_ATTR, False)
        if is_pruned and not whole:
            raise Pruned(f"the pruner stopped it after evaluation {evaluation.index}.")
        if lease.promotion is not None and not whole and all(map(is_number, evaluation.values)):
            rung = lease.promotion.pauses_at(evaluation.budget_used, attributes.get(RESUMED_ATTR, 0.0))
            if rung is not None:
                lease.pause(rung, evaluation.values)  # before the checkpoint, so that its next worker knows
                raise Paused(f"paused at {evaluation.budget_used:.0%} of its training.")
        if lease.is_budget_spent():
            raise Paused(BUDGET_SPENT)

    def _should_stop(self, lease: Lease) -> bool:
        lease.check()
        self.pace.note_step(self._checkpoint_seconds)
        return self._stop.is_set() or lease.study_closed.is_set()

    def _note_progress(self, lease: Lease, progress: Progress) -> None:
        self._checkpoint_seconds = progress.checkpoint_seconds
        lease.progress = progress

    def _with_scores(
        self, trial: optuna.trial.Trial, lease: Lease, folder: Path, result: TrialResult
    ) -> TrialResult:
        study = self._executor.study
        if study.evaluation.test or study.comparison:
            split = "test" if study.evaluation.test else "validation"
            result, statistics = with_scores(self._executor, folder, trial.params, result, split)
            if study.comparison and statistics:
                key = study.name, trial.number
                store_row_statistics(self._storage, lease, key, statistics, study.named_metrics)
        return result


def with_shared_device(result: TrialResult, named_metrics: Collection[str]) -> TrialResult:
    """Record that another worker joined the device during the trial. The trial's energy is then unknown.

    A trial with energy as an objective or a limit fails without a retry: it would share its device again.
    """
    telemetry = {**result.telemetry, "device": {**result.telemetry["device"], "shared": True}}
    measured = telemetry.get("throughput", {})
    if measured.get(ENERGY) is None:
        return replace(result, telemetry=telemetry)
    missing = "another worker joined this GPU during the trial."
    telemetry |= {"throughput": {**measured, ENERGY: None}, "energy_missing": missing}
    headline = {name: value for name, value in result.headline.items() if name != ENERGY}
    result = replace(result, telemetry=telemetry, headline=headline)
    if ENERGY not in named_metrics:
        return result
    reason = f"{ENERGY} is not known: {missing} Run one worker on each GPU."
    return replace(result, outcome=Outcome.FAILED, reason=reason, values=None, constraints={})
