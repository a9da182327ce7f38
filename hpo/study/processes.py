"""Worker processes on one machine: where each runs, its signals, and how they are started and watched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from hpo.config.study_config import StudyConfig
from hpo.device import available_cores
from hpo.errors import HpoError, InputError, RunError
from hpo.study.deaths import record_death
from hpo.study.lifecycle import read_state
from hpo.study.storage import Storage
from hpo.study.watch import StudyWatch
from hpo.study.worker import RunSummary

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


@dataclass(frozen=True)
class _Worker:
    """A worker process, which stops when its standard input is closed, also by the death of this one."""

    process: subprocess.Popen[bytes]
    log: Path
    log_begin: int
    """Where in the log this process begins."""

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def failure(self) -> HpoError:
        code = self.process.returncode
        end = self.log.read_bytes()[self.log_begin :].decode(errors="replace").strip()[-2000:]
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        kind = InputError if code == InputError.exit_code else RunError
        return kind(f"A worker {how} before the study was done. The end of {self.log}:\n{end}")


def run_workers(
    config: StudyConfig,
    storage: Storage,
    runs_dir: Path,
    places: Sequence[WorkerPlace],
    *,
    stop: threading.Event | None = None,
    options: Sequence[str] = (),
) -> RunSummary:
    """Run a process in each of `places` (see `place_workers`), and wait for all of them.

    None is restarted: the others take over its trial. What a process prints is added to
    `runs_dir`/<study>/worker-<number>.log. The URL of the storage is passed in the environment, because
    everybody on a machine can read the arguments of a process.

    Raises:
        InputError, RunError: workers failed and the study is not done; with the end of the log.
    """
    stop = storage.stop = stop or threading.Event()
    folder = runs_dir / config.name
    folder.mkdir(parents=True, exist_ok=True)
    command = [*worker_command(config.name, config.timeout), *options]
    # Each worker would otherwise use all cores, and they would get into each other's way.
    threads = max(1, available_cores() // len(places))
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ, "HPO_STORAGE": storage.url}
    watch = StudyWatch(storage, config)
    started = time.monotonic()
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                _started(command, folder / f"worker-{number}.log", environment | place.environment)
            )
            for number, place in enumerate(places)
        ]
        _wait(workers, storage, stop)
    outcomes = Counter(event.outcome for event in watch.look() if event.kind == "finished")
    stopped = RunSummary("stopped", outcomes)
    if stop.is_set():
        return stopped
    counts = storage.slot_counts(config.name)
    if not counts["open"] and not counts["running"]:
        return RunSummary("finished", outcomes)
    if read_state(storage, config.name) != "open":
        return RunSummary("halted", outcomes)
    if any(worker.process.returncode == stopped.exit_code for worker in workers):
        return stopped  # told to by somebody else
    for worker in workers:
        if worker.process.returncode:
            raise worker.failure()
    is_late = config.timeout is not None and time.monotonic() - started > config.timeout
    return RunSummary("timeout" if is_late else "elsewhere", outcomes)


def worker_command(study: str, timeout: float | None) -> list[str]:
    """Return the command line of one worker process."""
    command = [sys.executable, "-m", "hpo", "worker", study]
    return command if timeout is None else [*command, "--timeout", str(timeout)]


@contextmanager
def _started(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator[_Worker]:
    """Start a worker process; it is killed if it still runs at the end of the block."""
    with log.open("ab") as output:
        begin = output.tell()
        output.write(f"--- a worker starts, {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %Z}\n".encode())
        output.flush()
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C in the terminal reaches this process alone
        ) as process:
            try:
                yield _Worker(process, log, begin)
            finally:
                process.kill()  # where the parent is leaving on an error or a second Ctrl-C


def _wait(workers: Sequence[_Worker], storage: Storage, stop: threading.Event) -> None:
    """Wait until all workers have ended, and note how."""
    living = list(workers)
    while living:
        if stop.wait(0.5):
            for worker in workers:
                worker.stop()
            for worker in workers:
                worker.process.wait()
        for worker in [worker for worker in living if worker.process.poll() is not None]:
            living.remove(worker)
            record_death(storage, worker.process.pid, worker.process.returncode)
