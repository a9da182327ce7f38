"""Worker processes on one machine: where each runs, its signals, and how they are started and watched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import optuna
from optuna.exceptions import StorageInternalError
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError

from hpo.config.study_config import StudyConfig
from hpo.errors import HpoError, InputError, RunError
from hpo.study.deaths import record_death
from hpo.study.storage import Storage
from hpo.study.worker import OnEvent, RunSummary, TrialEvent

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
        living = list(processes)
        while living:
            if stop.wait(0.5):
                for process in processes:
                    assert process.stdin is not None
                    process.stdin.close()
                for process in processes:
                    process.wait()
            for process in [process for process in living if process.poll() is not None]:
                living.remove(process)
                record_death(storage, process.pid, process.returncode)
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
