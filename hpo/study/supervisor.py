"""The supervisor of a machine's workers: one process per place, started again when it dies.

A place is a GPU or a share of the CPU's cores. What a worker process ends with decides:

- exit code 0: it has no more to do; 2: its input is wrong, as it would be again; 130: somebody told it alone
  to stop, or its job ends. It is not started again, and the others go on.
- anything else, a signal or exit code 1: it died. The death is recorded first (`hpo.study.deaths`), so that a
  configuration that kills its process costs itself and no other; then the worker is started again, at most
  `max_restarts` times within an hour. When these are used up, the place itself is broken: the other workers
  checkpoint and leave, and the error shows the end of the log.

Workers stop when their standard input ends. So they checkpoint and leave when this process is told to, and
also when it is killed.

This process waits for no database: while that is away, a worker that died waits to be recorded and started.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from hpo.config.study_config import StudyConfig
from hpo.device import available_cores
from hpo.errors import HpoError, InputError, OutageError, RunError
from hpo.study.deaths import record_death
from hpo.study.lifecycle import is_in_work, read_state
from hpo.study.stopping import WORKERS_ON_DEVICE, Stop
from hpo.study.storage import Storage
from hpo.study.time_left import TimeLeft
from hpo.study.watch import StudyWatch
from hpo.study.worker import RunSummary

RESTART_SECONDS = 3600.0
"""Within which restarts are counted."""

LEAVE_SECONDS = 60.0
"""How long the workers have to checkpoint and leave where this process ends on an error."""

_STOPPED = RunSummary("stopped").exit_code
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerPlace:
    """Where a worker process runs."""

    workers_on_device: int
    """How many workers have its device, itself among them."""
    cuda_device: str | None = None
    """The one GPU that it sees, as CUDA_VISIBLE_DEVICES names it; None: what the parent process sees."""
    cores: frozenset[int] = frozenset()
    """The cores that it runs on; none: those of the parent process."""

    @property
    def environment(self) -> dict[str, str]:
        """What a process has in its environment to be in this place."""
        gpu = {} if self.cuda_device is None else {"CUDA_VISIBLE_DEVICES": self.cuda_device}
        return {WORKERS_ON_DEVICE: str(self.workers_on_device), **gpu}


def place_workers(
    num_workers: int, devices: Sequence[str], cores: Sequence[int] | None = None
) -> list[WorkerPlace]:
    """Where each worker runs.

    `devices` are those of `cuda_devices`, given out in turn; a worker sees its GPU alone, so that nothing of
    it can come to lie on another. Without devices all workers share the CPU, and each has its own of the
    `cores` (default: those that this process may use) if there are enough.
    """
    num_devices = max(1, len(devices))
    if cores is None:
        cores = sorted(os.sched_getaffinity(0))
    shares = num_workers if not devices and 1 < num_workers <= len(cores) else 0
    return [
        WorkerPlace(
            workers_on_device=len(range(number % num_devices, num_workers, num_devices)),
            cuda_device=devices[number % num_devices] if num_devices > 1 else None,
            cores=frozenset(
                cores[number * len(cores) // shares : (number + 1) * len(cores) // shares] if shares else ()
            ),
        )
        for number in range(num_workers)
    ]


class _Worker:
    """A place and the process in it, which stops when its standard input is closed, also by our death."""

    def __init__(self, number: int, place: WorkerPlace, log: Path, environment: Mapping[str, str]) -> None:
        self.number = number
        self._place = place
        self._log = log
        self._environment = {**environment, **place.environment}
        self._restarts: deque[float] = deque()
        self._log_begin = 0  # of the process that runs now

    def start(self, command: Sequence[str]) -> None:
        with self._log.open("ab") as output:
            self._log_begin = output.tell()
            now = f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %Z}"
            output.write(f"--- a worker starts, {now}\n".encode())
            output.flush()
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,  # Ctrl-C in the terminal reaches this process alone
            )
        if self._place.cores:
            with suppress(ProcessLookupError):  # it has ended already
                # Its threads, which are not there yet, inherit it.
                os.sched_setaffinity(self.process.pid, self._place.cores)

    def may_restart(self, max_restarts: int) -> bool:
        """Count a restart, unless those of the last hour are used up."""
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > RESTART_SECONDS:
            self._restarts.popleft()
        if len(self._restarts) >= max_restarts:
            return False
        self._restarts.append(now)
        _logger.warning(
            "Worker %d %s; it is started again (%d of at most %d times an hour). Its log: %s",
            self.number,
            self.how_it_ended,
            len(self._restarts),
            max_restarts,
            self._log,
        )
        return True

    def stop(self) -> None:
        """Have it checkpoint and leave."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def kill(self) -> None:
        self.stop()
        self.process.kill()
        self.process.wait()

    @property
    def died(self) -> bool:
        """Whether it ended in a way that another try may not."""
        return self.process.returncode not in (0, InputError.exit_code, _STOPPED)

    @property
    def how_it_ended(self) -> str:
        code = self.process.returncode
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def failure(self) -> HpoError:
        end = self._log.read_bytes()[self._log_begin :].decode(errors="replace").strip()[-2000:]
        again = f", having been started again {len(self._restarts)} times within an hour"
        kind = InputError if self.process.returncode == InputError.exit_code else RunError
        return kind(
            f"A worker {self.how_it_ended} before the study was done{again if self._restarts else ''}. "
            f"The end of {self._log}:\n{end}"
        )


def run_workers(
    config: StudyConfig,
    storage: Storage,
    runs_dir: Path,
    places: Sequence[WorkerPlace],
    *,
    stop: Stop | None = None,
    max_restarts: int = 0,
    options: Sequence[str] = (),
    storage_as_given: str | None = None,
) -> RunSummary:
    """Run a process in each of `places` (see `place_workers`), and wait for all of them.

    What a process prints is added to `runs_dir`/<study>/worker-<host>-<number>.log. The storage is passed in
    the environment, because everybody on a machine can read the arguments of a process.

    Args:
        max_restarts: how often the worker of a place is started again within an hour.
        options: more of `hpo worker`.
        storage_as_given: what the processes find the storage by, such as `@FILE`; None: by its URL.

    Raises:
        InputError, RunError: workers failed and the study is not done; with the end of the log.
    """
    stop = storage.stop = stop or Stop()
    if stop.is_set():
        return RunSummary("stopped")
    watch = StudyWatch(storage, config)
    deadline = time.monotonic() + (config.timeout or float("inf"))

    def command() -> list[str]:
        timeout = None if config.timeout is None else max(1e-3, deadline - time.monotonic())
        return [*worker_command(config.name, timeout, stop.until), *options]

    def is_over() -> bool:
        return time.monotonic() > deadline or not is_in_work(storage, config.name)

    workers = _workers(places, runs_dir / config.name, storage_as_given or storage.url)
    with _started(workers, command()):
        broken = _supervise(workers, command, is_over, storage, stop, max_restarts)
    outcomes = Counter(event.outcome for event in watch.look() if event.kind == "finished")
    if stop.is_set():
        return RunSummary("stopped", outcomes)
    counts = storage.slot_counts(config.name)
    if not counts["open"] and not counts["running"]:
        return RunSummary("finished", outcomes)
    if read_state(storage, config.name) != "open":
        return RunSummary("halted", outcomes)
    if _were_stopped(workers, broken, stop):
        return RunSummary("stopped", outcomes)
    is_late = time.monotonic() > deadline or not TimeLeft(storage, config.name, stop).suffices()
    return RunSummary("timeout" if is_late else "elsewhere", outcomes)


def serve_with_workers(
    storage: Storage,
    runs_dir: Path,
    places: Sequence[WorkerPlace],
    options: Sequence[str],
    *,
    stop: Stop,
    max_restarts: int = 0,
    storage_as_given: str | None = None,
) -> Literal["idle", "stopped"]:
    """Run a worker without a study of its own in each of `places`, and wait for all of them.

    What they print is added to `runs_dir`/worker-<host>-<number>.log. Other arguments and errors are those of
    `run_workers`; a timeout is one of the `options`, and begins anew with a worker that is started again.
    """
    storage.stop = stop
    workers = _workers(places, runs_dir, storage_as_given or storage.url)
    command = [*worker_command(None, None, stop.until), *options]
    with _started(workers, command):
        broken = _supervise(workers, lambda: command, lambda: False, storage, stop, max_restarts)
    return "stopped" if _were_stopped(workers, broken, stop) else "idle"


def worker_command(study: str | None, timeout: float | None, until: float | None) -> list[str]:
    """Return the command line of one worker process; without a `study` it serves all."""
    command = [sys.executable, "-m", "hpo", "worker", *([] if study is None else [study])]
    if timeout is not None:
        command += ["--timeout", str(timeout)]
    if until is not None:
        command += ["--until", datetime.fromtimestamp(until, UTC).isoformat()]
    return command


def _workers(places: Sequence[WorkerPlace], folder: Path, storage: str) -> list[_Worker]:
    folder.mkdir(parents=True, exist_ok=True)
    # Each worker would otherwise use all cores, and they would get into each other's way.
    threads = max(1, available_cores() // len(places))
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ, "HPO_STORAGE": storage}
    host = socket.gethostname()
    return [
        _Worker(number, place, folder / f"worker-{host}-{number}.log", environment)
        for number, place in enumerate(places)
    ]


@contextmanager
def _started(workers: Sequence[_Worker], command: Sequence[str]) -> Iterator[None]:
    """Start the processes.

    Where the block ends on an error, those that still run have `LEAVE_SECONDS` to leave; after a second
    Ctrl-C they are killed.
    """
    started = []
    seconds = LEAVE_SECONDS
    try:
        for worker in workers:
            worker.start(command)
            started.append(worker)
        yield
    except KeyboardInterrupt:
        seconds = 0.0
        raise
    finally:
        _end(started, seconds)


def _end(workers: Sequence[_Worker], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for worker in workers:
        worker.stop()
    try:
        for worker in workers:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for worker in workers:
            worker.kill()


def _supervise(
    workers: Sequence[_Worker],
    command: Callable[[], Sequence[str]],
    is_over: Callable[[], bool],
    storage: Storage,
    stop: Stop,
    max_restarts: int,
) -> _Worker | None:
    """Wait until all workers have ended, and start those again that die.

    `is_over` says whether there is nothing more to do; it is asked once each time, and may find the database
    away.

    Returns:
        The worker whose restarts were used up, if any.
    """
    living, broken = list(workers), None
    while living:
        leaving = stop.wait(0.5) or broken is not None
        if leaving:
            for worker in living:
                worker.stop()
            for worker in living:
                worker.process.wait()
        for worker in [worker for worker in living if worker.process.poll() is not None]:
            worker.stop()
            try:
                record_death(storage, worker.process.pid, worker.process.returncode)
                may_go_on = not leaving and worker.died and not storage.attempt(is_over)
            except OutageError:
                if leaving:
                    return broken
                break  # it waits for the next round, as the others do
            if stop.is_set() or not may_go_on:
                living.remove(worker)
            elif worker.may_restart(max_restarts):
                worker.start(command())
            else:
                living.remove(worker)
                broken = worker
    return broken


def _were_stopped(workers: Sequence[_Worker], broken: _Worker | None, stop: Stop) -> bool:
    """Whether the workers left because they were told to; if not, they found no more to do.

    Raises InputError or RunError where a worker failed.
    """
    if stop.is_set():
        return True
    if broken is not None:
        raise broken.failure()
    if any(worker.process.returncode == _STOPPED for worker in workers):
        if stop.until is not None:  # they leave before this process
            stop.set_out_of_time()
        return True  # else told to by somebody else
    for worker in workers:
        if worker.process.returncode:
            raise worker.failure()
    return False
