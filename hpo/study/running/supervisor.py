"""The supervisor of a machine's workers: processes, each started again when it dies.

A worker that ends with exit code 0 (done), 2 (wrong input) or 130 (stopped) is not started again. After
anything else it is, at most `MAX_RESTARTS` times within an hour. Then the machine is broken: the other
workers checkpoint and leave, and the error shows the end of the log. Workers stop when their standard input
ends, also by the death of this process. During an outage, a dead worker waits for its restart.
"""

import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from hpo.code import trust_options
from hpo.config.allowed import ALLOW, allowing
from hpo.config.limits import check_energy
from hpo.config.study_config import StudyConfig
from hpo.device import (
    CUDA_CONTEXT_BYTES,
    DeviceInfo,
    EnergyCounter,
    available_cores,
    cuda_devices,
    memory_share,
    probe_device,
)
from hpo.errors import HpoError, InputError, OutageError, RunError
from hpo.precision.table import AmpConfig
from hpo.study.reading.watch import StudyWatch, outcome_of
from hpo.study.running.stopping import WORKERS_ON_DEVICE, RunSummary, Stop
from hpo.study.store.lifecycle import is_in_work, read_state
from hpo.study.store.process import this_job
from hpo.study.store.storage import Storage

MAX_RESTARTS = 10  # most restarts of a dead worker within `RESTART_SECONDS`
RESTART_SECONDS = 3600.0

LEAVE_SECONDS = 60.0  # time for the workers to checkpoint and leave when this process ends on an error

_STOPPED = RunSummary("stopped").exit_code
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeviceShare:
    """A worker process's share of the machine's devices."""

    workers_on_device: int  # number of workers on its device, itself included
    cuda_device: str | None = None
    """Its only visible GPU, by its name in CUDA_VISIBLE_DEVICES; None: all of the parent process."""

    @property
    def environment(self) -> dict[str, str]:
        gpu = {} if self.cuda_device is None else {"CUDA_VISIBLE_DEVICES": self.cuda_device}
        return {WORKERS_ON_DEVICE: str(self.workers_on_device), **gpu}


@dataclass(frozen=True)
class WorkerProcesses:
    shares: Sequence[DeviceShare]
    storage_as_given: str | None = None  # the user's name of the storage, such as `@FILE`; None: its URL


def share_devices(
    config: StudyConfig, workers: int | None = None, per_device: int | None = None
) -> list[DeviceShare]:
    """Return the share of each worker process of a run on this machine; []: this process is the worker.

    A worker sees its GPU alone. `workers` is their number (1: this process), `per_device` that on each GPU.
    Raises InputError if they need more memory than a GPU has, or share one whose energy the study needs.
    """
    if per_device is None and workers in (None, 1):
        return []
    devices = cuda_devices(config.device)
    num_devices = max(1, len(devices))
    count = workers or (per_device or 1) * num_devices
    if devices:
        device = probe_device(config.device)
        check_energy(config.named_metrics, EnergyCounter(device, shared=count > num_devices))
        share_memory(config.amp, device, math.ceil(count / num_devices))
    return [
        DeviceShare(
            workers_on_device=len(range(number % num_devices, count, num_devices)),
            cuda_device=devices[number % num_devices] if num_devices > 1 else None,
        )
        for number in range(count)
    ]


def share_memory(amp: AmpConfig, device: DeviceInfo, num_workers: int) -> AmpConfig:
    """Limit a worker to its share of a GPU's memory. Raises InputError if `amp` gives it a larger one."""
    if device.type != "cuda" or num_workers == 1:
        return amp
    share = memory_share(device, num_workers)
    given = amp.memory_fraction
    if given is None:
        return amp.model_copy(update={"memory_fraction": share})
    if given > share:
        raise InputError(
            f"amp.memory_fraction must be <= {math.floor(share * 1e4) / 1e4:g} for {num_workers} workers on "
            f"one {device.name}, where each needs {CUDA_CONTEXT_BYTES / 2**30:g} GiB more for its CUDA "
            f"context, but got {given:g}. Lower it, run fewer workers, or leave it out."
        )
    return amp


class _Worker:
    """A worker process. It stops when its standard input is closed, also by our death."""

    def __init__(self, number: int, log: Path, environment: Mapping[str, str]) -> None:
        self.number = number
        self._log = log
        self._environment = environment
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

    def may_restart(self) -> bool:
        """Count a restart, unless the last hour had too many."""
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > RESTART_SECONDS:
            self._restarts.popleft()
        if len(self._restarts) >= MAX_RESTARTS:
            return False
        self._restarts.append(now)
        _logger.warning(
            "Worker %d %s; it is started again (%d of at most %d times an hour). Its log: %s",
            self.number,
            self._how_it_ended,
            len(self._restarts),
            MAX_RESTARTS,
            self._log,
        )
        return True

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def kill(self) -> None:
        self.stop()
        self.process.kill()
        self.process.wait()

    @property
    def died(self) -> bool:
        """True if another start may end in another way."""
        return self.process.returncode not in (0, InputError.exit_code, _STOPPED)

    @property
    def _how_it_ended(self) -> str:
        code = self.process.returncode
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def failure(self) -> HpoError:
        end = self._log.read_bytes()[self._log_begin :].decode(errors="replace").strip()[-2000:]
        again = f", having been started again {len(self._restarts)} times within an hour"
        kind = InputError if self.process.returncode == InputError.exit_code else RunError
        return kind(
            f"A worker {self._how_it_ended} before the study was done{again if self._restarts else ''}. "
            f"The end of {self._log}:\n{end}"
        )


def run_workers(
    config: StudyConfig, storage: Storage, runs_dir: Path, processes: WorkerProcesses, stop: Stop
) -> RunSummary:
    """Run a worker of the study in each of the processes, and wait for all of them.

    Their output is in `runs_dir`/<study>/worker-<host>-<job or pid>-<number>.log. Raises InputError or
    RunError, with the end of the log, if workers failed and the study is not done.
    """
    if stop.is_set():
        return RunSummary("stopped")
    watch = StudyWatch(storage, config)
    deadline = min(stop.deadline, time.monotonic() + (config.timeout or math.inf))
    supervisor = _Supervisor(config, storage, processes, stop, deadline)
    supervisor.run(runs_dir / config.name)
    outcomes = Counter(map(outcome_of, watch.read().ended))
    if stop.is_set():
        return RunSummary("stopped", outcomes)
    if storage.is_finished(config.name):
        return RunSummary("finished", outcomes)
    if read_state(storage, config.name) != "open":
        return RunSummary("closed", outcomes)
    if supervisor.were_stopped():
        return RunSummary("stopped", outcomes)
    return RunSummary("timeout" if time.monotonic() > deadline else "elsewhere", outcomes)


def worker_command(study: str, timeout: float, until: float | None) -> list[str]:
    command = [sys.executable, "-m", "hpo", "worker", study]
    if math.isfinite(timeout):
        command += ["--timeout", str(max(1e-3, timeout))]
    if until is not None:
        command += ["--until", datetime.fromtimestamp(until, UTC).isoformat()]
    return command


@dataclass
class _Supervisor:
    config: StudyConfig
    storage: Storage
    processes: WorkerProcesses
    stop: Stop
    deadline: float
    broken: _Worker | None = None  # A worker without restarts left

    def run(self, folder: Path) -> None:
        """Run the workers, with their logs in `folder`. After an error they have `LEAVE_SECONDS` to leave."""
        self.storage.stop = self.stop
        self.workers = self._workers(folder)
        started = []
        try:
            for worker in self.workers:
                worker.start(self._command())
                started.append(worker)
            self._supervise()
        except BaseException as error:
            _end(started, 0.0 if isinstance(error, KeyboardInterrupt) else LEAVE_SECONDS)
            raise

    def _workers(self, folder: Path) -> list[_Worker]:
        folder.mkdir(parents=True, exist_ok=True)
        shares = self.processes.shares
        # Each worker would otherwise use all cores, and they would get into each other's way.
        threads = max(1, available_cores() // len(shares))
        # In the environment: everybody on a machine can read the arguments of a process.
        url = self.processes.storage_as_given or self.storage.url
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ, "HPO_STORAGE": url}
        environment[ALLOW] = allowing(self.config)
        # Jobs of one node, and commands of one machine, each write their files.
        job = f"{socket.gethostname()}-{(this_job() or str(os.getpid())).rpartition(':')[2]}"
        return [
            _Worker(number, folder / f"worker-{job}-{number}.log", {**environment, **share.environment})
            for number, share in enumerate(shares)
        ]

    def _command(self) -> list[str]:
        config, left = self.config, self.deadline - time.monotonic()
        trusts = ["--trust-remote-code"] if config.model.trust_remote_code else []
        command = worker_command(config.name, left, self.stop.until)
        return [*command, *trust_options(config.code, config.class_names), *trusts]

    def _is_over(self) -> bool:
        return time.monotonic() > self.deadline or not is_in_work(self.storage, self.config.name)

    def _supervise(self) -> None:
        living = list(self.workers)
        while living:
            leaving = self.stop.wait(0.5) or self.broken is not None
            if leaving:
                for worker in living:
                    worker.stop()
                for worker in living:
                    worker.process.wait()
            for worker in [worker for worker in living if worker.process.poll() is not None]:
                worker.stop()
                try:
                    may_go_on = not leaving and worker.died and not self.storage.attempt(self._is_over)
                except OutageError:
                    break  # all wait for the next round
                if self.stop.is_set() or not may_go_on:
                    living.remove(worker)
                elif worker.may_restart():
                    worker.start(self._command())
                else:
                    living.remove(worker)
                    self.broken = worker

    def were_stopped(self) -> bool:
        """Return whether the workers left because they were told to. Raises if one failed."""
        if self.stop.is_set():
            return True
        if self.broken is not None:
            raise self.broken.failure()
        if any(worker.process.returncode == _STOPPED for worker in self.workers):
            if self.stop.until is not None:  # they leave before this process
                self.stop.set_out_of_time()
            return True  # else somebody else stopped them
        for worker in self.workers:
            if worker.process.returncode:
                raise worker.failure()
        return False


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
