"""Workers: the loop that turns slots into finished trials, in this process or in several.

    claim a slot -> open its trial -> run it -> record its outcome -> next slot

Workers know of each other through the database alone, so it does not matter how many there are, where they
run and when they come or go. A worker leaves when every slot is done. While others still run the last
trials it waits, to take over if one of them dies.

Told to stop (SIGINT, SIGTERM), a worker lets its trial write a checkpoint and leaves; told twice, it dies
at once, which the database survives just as well.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import optuna
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.study import StudyDirection
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError

from hpo.config.search_space import suggest
from hpo.device import (
    CUDA_CONTEXT_BYTES,
    DeviceInfo,
    cuda_devices,
    imported_for_good,
    memory_limit,
    memory_share,
    probe_device,
)
from hpo.errors import HpoError, InputError, LeaseLostError, Pruned, RunError
from hpo.study.leases import Lease, Worker
from hpo.study.samplers import build_pruner, build_sampler
from hpo.study.storage import EvaluationRow, Storage

if TYPE_CHECKING:
    from hpo.config.study_config import StudyConfig
    from hpo.training.throughput import TrialResult
    from hpo.trial.executor import Executor
    from hpo.trial.telemetry import ScoredEvaluation

Execute = Callable[[optuna.trial.Trial, Lease], "TrialResult"]
"""Runs one trial. Calls `Lease.check` between steps, so that it stops when another worker has the trial."""

MORE_DEATHS = 2
"""How many more workers may die in a trial than it may have retries: few are the trial's fault."""

WORKERS_ON_DEVICE = "HPO_WORKERS_ON_DEVICE"
"""Environment variable of the processes of `run_workers`: how many of them have this one's device."""


@dataclass(frozen=True)
class WorkerPlace:
    """Where a worker process runs."""

    workers_on_device: int
    """How many workers have its device, itself among them."""
    cuda_device: str | None = None
    """The one GPU that it sees, as CUDA_VISIBLE_DEVICES names it; None: what the parent process sees."""

    @property
    def environment(self) -> dict[str, str]:
        """What a process has in its environment to be in this place."""
        gpu = {} if self.cuda_device is None else {"CUDA_VISIBLE_DEVICES": self.cuda_device}
        return {WORKERS_ON_DEVICE: str(self.workers_on_device), **gpu}


@dataclass(frozen=True)
class TrialEvent:
    """Something that a person who watches the study wants to see."""

    kind: Literal["started", "evaluated", "finished"]
    number: int
    params: Mapping[str, Any]
    values: tuple[float, ...] | None = None
    """Of the objectives: at this evaluation, or of a complete trial."""
    budget_used: float | None = None
    """Share of the trial's budget that is used, where known."""
    outcome: str = ""
    reason: str = ""


OnEvent = Callable[[TrialEvent], None]


@dataclass(frozen=True)
class RunSummary:
    """What one call ran."""

    ended: Literal["finished", "stopped", "timeout"]
    """Every slot is done; told to stop; out of time."""
    outcomes: Mapping[str, int] = field(default_factory=Counter)
    """How many trials ended how, here. Empty for a study that was finished before."""

    @property
    def exit_code(self) -> int:
        """130 after a stop, else 0."""
        return 130 if self.ended == "stopped" else 0


def run_study(
    config: StudyConfig,
    storage: Storage,
    runs_dir: Path,
    *,
    workers: int = 1,
    workers_per_device: int | None = None,
    worker_number: int = 0,
    resize: bool = True,
    study_name: str = "",
    on_event: OnEvent | None = None,
    stop: threading.Event | None = None,
) -> RunSummary:
    """Run the study's trials on this machine until its budget is used up or `stop` is set.

    Args:
        workers: more than one are processes of their own, `hpo worker STUDY`, spread over the GPUs of this
            machine in turn.
        workers_per_device: so many for each GPU of this machine, or on its CPU, in place of `workers`.
        worker_number: of this worker, for the sampler's seed.
        resize: False for a worker that joins: the stored `n_trials` stays as it is.
        study_name: STUDY as the user named it, for the processes.
        stop: from `stop_on_signals`, which is used where none is given.

    Raises:
        StudyChangedError: the stored study has another search space or definition, or had other data.
        InputError: the data, the model or the objective cannot be used, or the workers of one GPU may take
            more than its memory.
        RunError: the workers ended before the study did.
    """
    storage.create_or_resume_study(config, resize=resize)
    counts = storage.slot_counts(config.name)
    if not counts["open"] and not counts["running"]:
        return RunSummary("finished")
    with nullcontext(stop) if stop else stop_on_signals() as stop:
        if workers > 1 or workers_per_device is not None:
            devices = cuda_devices(config.device)
            if workers_per_device is not None:
                workers = workers_per_device * max(1, len(devices))
            places = place_workers(workers, devices)
            if devices:
                check_memory_fraction(config.amp.memory_fraction, places)
        if workers > 1:
            return run_workers(
                config, storage, runs_dir, places, study_name=study_name, on_event=on_event, stop=stop
            )
        with nullcontext() if "hpo.trial.executor" in sys.modules else imported_for_good():
            import torch

            from hpo.trial.executor import Executor

        if config.device != "cpu" and (num_devices := torch.cuda.device_count()) > 1:
            torch.cuda.set_device(worker_number % num_devices)
        num_on_device = int(os.environ.get(WORKERS_ON_DEVICE, "1"))
        device = probe_device(config.device)
        executor = Executor(
            share_memory(config, device, num_on_device),
            device,
            runs_dir,
            storage,
            shared_device=num_on_device > 1,
        )
        storage.bind_data(config.name, executor.dataset.fingerprint)
        study = storage.load_study(config.name)
        folder = partial(executor.trial_folder, storage.study_token(config.name))
        return run_worker(
            config,
            storage,
            trial_runner(executor, storage, stop, on_event),
            worker_number=worker_number,
            device=device.identity,
            memory_bytes=memory_limit(device, executor.amp.memory_fraction),
            on_event=on_event,
            stop=stop,
            after_trial=lambda: keep_best_checkpoints(study, folder, config.checkpoint.top_k),
        )


def run_worker(
    config: StudyConfig,
    storage: Storage,
    execute: Execute,
    *,
    worker_number: int = 0,
    device: str | None = None,
    memory_bytes: int | None = None,
    on_event: OnEvent | None = None,
    stop: threading.Event | None = None,
    after_trial: Callable[[], None] = lambda: None,
    poll_seconds: float = 2.0,
) -> RunSummary:
    """Run trials of the study with `execute` until there are none left, `stop` is set or time is up.

    `after_trial` is called when a trial has ended, here or with a worker that this one waited for. `device`
    is the `DeviceInfo.identity` of what `execute` runs on, so that others know whether they share it,
    and `memory_bytes` what it may take there, so that the sampler knows what may fit.
    """
    stop = stop or threading.Event()
    deadline = time.monotonic() + (config.timeout or float("inf"))
    study = storage.create_or_resume_study(config, resize=False)
    config = storage.completed(config)
    num_trials = len(study.get_trials(deepcopy=False))
    study.sampler = build_sampler(
        config.sampler,
        config.search_space,
        worker_number=worker_number,
        num_trials=num_trials,
        memory_bytes=memory_bytes,
    )
    study.pruner = build_pruner(config.pruner)
    outcomes: Counter[str] = Counter()
    with Worker(storage, study, max_retries=config.max_retries, device=device) as worker:
        while True:
            if stop.is_set():
                return RunSummary("stopped", outcomes)
            if time.monotonic() > deadline:
                return RunSummary("timeout", outcomes)
            lease = worker.claim()
            if lease is None:
                if not storage.slot_counts(config.name)["running"]:
                    after_trial()
                    return RunSummary("finished", outcomes)
                stop.wait(min(poll_seconds, max(0.0, deadline - time.monotonic())))
                continue
            with suppress(LeaseLostError):
                trial = worker.open_trial(lease)
                if trial is not None:
                    if lease.num_deaths > config.max_retries + MORE_DEATHS:
                        result = _died(lease.num_deaths)
                    else:
                        result = _run_trial(trial, lease, execute)
                    worker.record_outcome(lease, trial, result)
                    outcomes[result.outcome] += 1
                    after_trial()
                    if on_event:
                        end = (result.values, None, result.outcome, result.reason)
                        on_event(TrialEvent("finished", trial.number, trial.params, *end))


def _run_trial(trial: optuna.trial.Trial, lease: Lease, execute: Execute) -> TrialResult:
    try:
        return execute(trial, lease)
    except HpoError:
        raise
    except UpdateFinishedTrialError as error:
        raise LeaseLostError(f"Another worker has finished trial {trial.number}.") from error
    except Exception as error:
        from hpo.training.throughput import TrialResult

        reason = f"{type(error).__name__}: {error}"
        return TrialResult("failed", reason, traceback=traceback.format_exc())


def _died(num_deaths: int) -> TrialResult:
    from hpo.training.throughput import TrialResult

    return TrialResult("failed", f"its worker died {num_deaths} times in it")


def trial_runner(
    executor: Executor, storage: Storage, stop: threading.Event, on_event: OnEvent | None = None
) -> Execute:
    """Return how a trial runs for real: suggest, train with `executor`, report each evaluation."""
    on_event = on_event or (lambda _: None)
    metric_names = [objective.metric for objective in executor.study.objective]
    token = storage.study_token(executor.study.name)
    started_together = executor.shared_device

    def execute(trial: optuna.trial.Trial, lease: Lease) -> TrialResult:
        params = storage.persist(lambda: suggest(executor.study.search_space, trial))
        on_event(TrialEvent("started", trial.number, params))

        def on_evaluation(scored: ScoredEvaluation) -> None:
            evaluation = scored.evaluation
            row = EvaluationRow(
                step=evaluation.step,
                epoch=evaluation.epoch,
                seconds=evaluation.seconds,
                metrics={**dict(zip(metric_names, scored.values, strict=True)), **evaluation.metrics},
                train_examples_per_second=evaluation.rates.get("train_examples_per_second"),
                train_tokens_per_second=evaluation.rates.get("train_tokens_per_second"),
            )
            lease.check()
            prune = storage.report_evaluation(trial, evaluation.index, scored.values[0], row)
            used = evaluation.budget_used
            on_event(TrialEvent("evaluated", trial.number, params, scored.values, used))
            if prune and used < 1:
                raise Pruned(f"the pruner stopped it after evaluation {evaluation.index}.")

        def should_stop() -> bool:
            lease.check()
            return stop.is_set()

        folder = executor.trial_folder(token, trial.number)
        place = executor.device.identity
        executor.shared_device = started_together or storage.has_other_workers_on(place)
        result = executor.run(params, folder, f"{token}/{trial.number}", on_evaluation, should_stop)
        if not executor.shared_device and storage.has_other_workers_on(place):  # it came during the trial
            device = {**result.telemetry["device"], "shared": True}
            result = replace(result, telemetry={**result.telemetry, "device": device})
        return result

    return execute


def keep_best_checkpoints(study: optuna.Study, folder: Callable[[int], Path], top_k: int) -> None:
    """Remove the checkpoints of all finished trials but the best `top_k`.

    Best is by the first objective; with several, the trials of the Pareto front come first. `folder` gives
    that of a trial by its number.
    """
    trials = study.get_trials(deepcopy=False)
    sign = 1 if study.directions[0] == StudyDirection.MAXIMIZE else -1
    front = {trial.number for trial in study.best_trials} if len(study.directions) > 1 else set()
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    complete.sort(key=lambda trial: (trial.number not in front, -sign * trial.values[0], trial.number))
    kept = {trial.number for trial in complete[:top_k]}
    for trial in trials:
        if trial.state.is_finished() and trial.number not in kept:
            shutil.rmtree(folder(trial.number), ignore_errors=True)


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """Set the event at the first SIGINT or SIGTERM; the second raises KeyboardInterrupt, the third kills.

    The event is set, too, when this process is one of `run_workers` and that one wants it to stop or died.
    """
    stop = threading.Event()

    def handle(number: int, _frame: object) -> None:
        if stop.is_set():
            signal.signal(number, signal.SIG_DFL)
            raise KeyboardInterrupt
        stop.set()

    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.signal(number, handle) for number in numbers}
    if WORKERS_ON_DEVICE in os.environ:
        threading.Thread(target=_stop_at_end_of_input, args=[stop], daemon=True).start()
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _stop_at_end_of_input(stop: threading.Event) -> None:
    # Not `sys.stdin`: its lock, held here at exit, would abort the interpreter.
    while os.read(0, 1):
        pass
    stop.set()


def place_workers(num_workers: int, devices: Sequence[str]) -> list[WorkerPlace]:
    """Where each worker runs.

    `devices` are those of `cuda_devices`, given out in turn; none of them: all workers share the CPU. A
    worker sees its GPU alone, so that nothing of it can come to lie on another.
    """
    num_devices = max(1, len(devices))
    return [
        WorkerPlace(
            workers_on_device=len(range(number % num_devices, num_workers, num_devices)),
            cuda_device=devices[number % num_devices] if num_devices > 1 else None,
        )
        for number in range(num_workers)
    ]


def check_memory_fraction(fraction: float | None, places: Sequence[WorkerPlace]) -> None:
    """Refuse, before any process starts, workers that together may take more than any GPU's memory.

    A trial that found no memory because of its neighbour would be stored as one that does not fit. What of
    the memory CUDA needs depends on the GPU: `share_memory` looks at that, in each worker.

    Raises InputError.
    """
    most = max(place.workers_on_device for place in places)
    if fraction is not None and most * fraction > 1:
        raise InputError(
            f"amp.memory_fraction times the workers on one GPU must be <= 1, but got {fraction:g} times "
            f"{most}. Lower it, run fewer workers, or leave it out: each worker then gets its share."
        )


def share_memory(config: StudyConfig, device: DeviceInfo, num_workers: int) -> StudyConfig:
    """Bound a worker to its share of a GPU's memory, or to what the study says that it may take.

    Raises InputError where the workers and their CUDA contexts may together take more than there is.
    """
    if device.type != "cuda" or num_workers == 1:
        return config
    share = memory_share(device, num_workers)
    given = config.amp.memory_fraction
    if given is None:
        amp = config.amp.model_copy(update={"memory_fraction": share})
        return config.model_copy(update={"amp": amp})
    if given > share:
        raise InputError(
            f"amp.memory_fraction must be <= {math.floor(share * 1e4) / 1e4:g} for {num_workers} workers on "
            f"one {device.name}, where each needs {CUDA_CONTEXT_BYTES / 2**30:g} GiB more for its CUDA "
            f"context, but got {given:g}. Lower it, run fewer workers, or leave it out: each worker then "
            f"gets its share."
        )
    return config


def run_workers(
    config: StudyConfig,
    storage: Storage,
    runs_dir: Path,
    places: Sequence[WorkerPlace],
    *,
    study_name: str,
    on_event: OnEvent | None = None,
    stop: threading.Event | None = None,
) -> RunSummary:
    """Run a process in each of `places` (see `place_workers`), show their trials as events, and wait.

    None is restarted: the others take over its trial. What a process prints goes to
    `runs_dir`/<study>/worker-<number>.log. The URL of the storage is passed in the environment, because
    everybody on a machine can read the arguments of a process.

    Raises:
        InputError, RunError: workers failed and the study is not done; with the end of the log.
    """
    stop = stop or threading.Event()
    study = storage.load_study(config.name)
    folder = runs_dir / config.name
    folder.mkdir(parents=True, exist_ok=True)
    logs = [folder / f"worker-{number}.log" for number in range(len(places))]
    # Each worker would otherwise use all cores, and they would get into each other's way.
    threads = max(1, len(os.sched_getaffinity(0)) // len(places)) if hasattr(os, "sched_getaffinity") else 1
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    environment |= {"HPO_STORAGE": storage.url}
    watch = _Watch(study, on_event or (lambda _: None))
    with ExitStack() as stack:
        processes = []
        for number, (log, place) in enumerate(zip(logs, places, strict=True)):
            output = stack.enter_context(log.open("wb"))
            process = subprocess.Popen(
                worker_command(study_name, number, config.timeout),
                stdin=subprocess.PIPE,  # the worker stops when this pipe is closed, also by our own death
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, **place.environment},
                start_new_session=True,  # Ctrl-C in the terminal reaches this process alone
            )
            stack.callback(_end, process)
            processes.append(process)
        while any(process.poll() is None for process in processes):
            if stop.wait(0.5):
                for process in processes:
                    assert process.stdin is not None
                    process.stdin.close()
                for process in processes:
                    process.wait()
            watch.look()
        watch.look()
    summary = RunSummary("stopped" if stop.is_set() else "finished", watch.outcomes)
    counts = storage.slot_counts(config.name)
    if summary.ended == "finished" and (counts["open"] or counts["running"]):
        for process, log in zip(processes, logs, strict=True):
            if process.returncode:
                raise _failure(process.returncode, log)
        return RunSummary("timeout", watch.outcomes)
    return summary


def worker_command(study_name: str, number: int, timeout: float | None) -> list[str]:
    """Return the command line of one worker process."""
    command = [sys.executable, "-m", "hpo", "worker", study_name, "--worker-number", str(number)]
    return command if timeout is None else [*command, "--timeout", str(timeout)]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a worker that still runs: the parent is leaving on an error or a second Ctrl-C."""
    if process.poll() is None:
        process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def _failure(exit_code: int, log: Path) -> HpoError:
    end = log.read_text(errors="replace").strip()[-2000:]
    how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"
    kind = InputError if exit_code == InputError.exit_code else RunError
    return kind(f"A worker {how} before the study was done. The end of {log}:\n{end}")


class _Watch:
    """Turns what other processes do to the study's trials into events."""

    def __init__(self, study: optuna.Study, on_event: OnEvent) -> None:
        self.outcomes: Counter[str] = Counter()
        self._study = study
        self._on_event = on_event
        trials = study.get_trials(deepcopy=False)
        self._finished = {trial.number for trial in trials if trial.state.is_finished()}
        self._num_evaluations: dict[int, int] = {}

    def look(self) -> None:
        """Emit events for what has changed since the last look."""
        try:
            trials = self._study.get_trials(deepcopy=False)
        except (SQLAlchemyError, StorageInternalError):
            return  # the database is away; the workers wait for it, and so do we
        for trial in trials:
            if trial.number in self._finished or trial.state == TrialState.WAITING or not trial.params:
                continue
            about = (trial.number, trial.params)
            if trial.number not in self._num_evaluations:
                self._num_evaluations[trial.number] = 0
                self._on_event(TrialEvent("started", *about))
            steps = sorted(trial.intermediate_values)
            for step in steps[self._num_evaluations[trial.number] :]:
                self._on_event(TrialEvent("evaluated", *about, (trial.intermediate_values[step],)))
            self._num_evaluations[trial.number] = len(steps)
            if trial.state.is_finished():
                outcome = trial.user_attrs.get("outcome", "")
                values = tuple(trial.values) if trial.state == TrialState.COMPLETE else None
                reason = trial.user_attrs.get("outcome_reason", "")
                self._on_event(TrialEvent("finished", *about, values, None, outcome, reason))
                self._finished.add(trial.number)
                self.outcomes[outcome] += 1
