"""Outages of a real PostgreSQL, of the network and of workers in real processes.

The trials train nothing, but use the real `TrialRunner` and lease. Each worker pretends to have a machine of
its own, so that only heartbeats prove its life.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.command_line import finish as finish_command
from support.command_line import ok, saved_steps, start_hpo, wait_until
from support.postgres import PostgresServer
from support.proxy import Proxy
from support.tiny import write_long_study
from support.worker_process import finish, note, notes, result, start_process, study, wait_for

from hpo.config.study_config import StudyConfig
from hpo.errors import LeaseLostError
from hpo.study.reading.reader import read_study
from hpo.study.running.stopping import Stop
from hpo.study.running.worker import TrialRunner, WorkerOptions, run_worker
from hpo.study.store import connection
from hpo.study.store.connection import BoundedConnection
from hpo.study.store.storage import open_storage
from hpo.study.store.studies import create_or_resume_study

pytestmark = pytest.mark.postgres

STEPS, EVALUATED = 100, list(range(20, 101, 20))


def last_saved_step(folder: Path) -> int:
    """Return the step of the newest checkpoint in a trial's folder, or 0."""
    return max((int(path.name.removeprefix("step-")) for path in folder.glob("step-*[0-9]")), default=0)


class Train:
    """A simulated Executor: a step takes `step_seconds`, and each evaluation has a checkpoint."""

    def __init__(self, config: StudyConfig, folder: Path, step_seconds: float) -> None:
        self.study = config
        self.device = SimpleNamespace(device_id="cpu")
        self._folder = folder
        self._step_seconds = step_seconds

    def trial_folder(self, _token: str, number: int) -> Path:
        return self._folder / f"trial-{number:05d}"

    def run(self, _params: Any, folder: Path, _key: str, callbacks: Any, **_: Any) -> Any:
        number, log = int(folder.name.removeprefix("trial-")), self._folder / "log"
        start = last_saved_step(folder)
        note(log, event="started", number=number, pid=os.getpid(), step=start)
        try:
            for step in range(start + 1, STEPS + 1):
                time.sleep(self._step_seconds)
                if step in EVALUATED:
                    callbacks.on_evaluation(_evaluation(step))
                    (folder / f"step-{step:08d}").mkdir(parents=True)
                note(log, event="step", number=number, pid=os.getpid(), step=step)
                if callbacks.should_stop():
                    return result("preempted")
        except LeaseLostError:
            note(log, event="lost", number=number, pid=os.getpid(), step=step)
            raise
        note(log, event="ended", number=number, pid=os.getpid(), step=STEPS)
        return result("complete", telemetry={"device": {}})


def _evaluation(step: int) -> Any:
    shares: Any = {"index": EVALUATED.index(step) + 1, "budget_used": step / STEPS, "epoch": 1.0}
    measured: Any = {"step": step, "seconds": float(step), "metrics": {}, "rates": {}}
    return SimpleNamespace(**shares, **measured, values=(step / STEPS,), is_last=step == STEPS)


def work(
    url: str,
    config: StudyConfig,
    folder: Path,
    machine: str,
    lease_seconds: float,
    step_seconds: float = 0.05,
) -> None:
    """Be a worker on a machine of its own until the study is done."""
    socket.gethostname = lambda: machine
    BoundedConnection.answer_seconds = min(lease_seconds / 2, BoundedConnection.answer_seconds)
    connection.IDLE_SECONDS = 5.0  # frees the locks of a stopped worker
    stop = Stop()
    with open_storage(url, stop=stop) as storage:
        storage.lease_seconds = lease_seconds
        executor: Any = Train(config, folder, step_seconds)
        run_worker(
            config,
            storage,
            TrialRunner(executor, storage, stop),
            WorkerOptions(poll_seconds=0.2),
            stop=stop,
        )


def log_of(folder: Path, event: str) -> list[dict[str, Any]]:
    return [line for line in notes(folder / "log") if line["event"] == event]


def check_whole(url: str, config: StudyConfig, folder: Path) -> None:
    """Check that each trial is complete once, with all its evaluations once."""
    with open_storage(url) as storage:
        record = read_study(storage, config.name)
        optuna_trials = storage.load_study(config.name).trials
    assert record.counts == {"open": 0, "running": 0, "done": config.n_trials}
    assert [trial.outcome for trial in record.trials] == ["complete"] * config.n_trials
    for trial, frozen in zip(record.trials, optuna_trials, strict=True):
        assert [row.step for row in trial.evaluations] == EVALUATED
        assert frozen.intermediate_values == {i: step / STEPS for i, step in enumerate(EVALUATED, 1)}
    ends = Counter(line["number"] for line in log_of(folder, "ended"))
    assert ends == dict.fromkeys(range(config.n_trials), 1), "none is trained twice to its end"


def check_each_started_once(folder: Path, config: StudyConfig) -> None:
    started = Counter(line["number"] for line in log_of(folder, "started"))
    assert started == dict.fromkeys(range(config.n_trials), 1)


@pytest.fixture
def url(postgres_server: PostgresServer, postgres_url: str) -> str:
    """A database that keeps every commit in a crash of its server."""
    name = postgres_url.rpartition("/")[2]
    with postgres_server.connect("postgres") as server:
        server.execute(f"ALTER DATABASE {name} SET synchronous_commit = on")
    return postgres_url


@pytest.fixture
def proxy(postgres_server: PostgresServer) -> Iterator[Proxy]:
    with Proxy(postgres_server.port) as proxy:
        yield proxy


def start_workers(url: str, config: StudyConfig, folder: Path, *args: float, count: int = 3) -> list[Any]:
    with open_storage(url) as storage:
        create_or_resume_study(storage, config)
    machines = [f"node-{number}" for number in range(count)]
    workers = [start_process(work, url, config, folder, machine, *args) for machine in machines]
    pids = {worker.pid for worker in workers}
    wait_for(lambda: pids <= {line["pid"] for line in log_of(folder, "started")}, 180)
    return workers


def steps_made(folder: Path) -> int:
    return len(log_of(folder, "step"))


def wait_for_start(folder: Path) -> None:
    before = len(log_of(folder, "started"))
    wait_for(lambda: len(log_of(folder, "started")) > before, 120)  # a slow trial takes 60 s


def wait_for_steps(folder: Path, more: int) -> None:
    enough = steps_made(folder) + more
    wait_for(lambda: steps_made(folder) >= enough, 180)  # on a loaded machine


def test_postgres_stops_twice(postgres_server: PostgresServer, url: str, tmp_path: Path) -> None:
    config = study(8, pruner={"name": "none"})
    workers = start_workers(url, config, tmp_path, 2.0, 0.02)
    for _ in range(2):
        wait_for_start(tmp_path)
        postgres_server.stop(immediate=True)
        try:
            time.sleep(3.0)  # longer than a lease
        finally:
            postgres_server.start()
    finish(*workers)
    check_whole(url, config, tmp_path)
    check_each_started_once(tmp_path, config)


def test_network_is_silent_for_a_while(url: str, proxy: Proxy, tmp_path: Path) -> None:
    """Earlier connections stay half-open for ever."""
    config, through = study(6, pruner={"name": "none"}), through_proxy(url, proxy)
    workers = start_workers(through, config, tmp_path, 3.0)
    wait_for_steps(tmp_path, 50)
    proxy.silence(True)
    time.sleep(4.5)
    proxy.silence(False)
    finish(*workers)
    check_whole(url, config, tmp_path)
    check_each_started_once(tmp_path, config)


def through_proxy(url: str, proxy: Proxy) -> str:
    return re.sub(r":\d+/", f":{proxy.port}/", url) + "?connect_timeout=2"


def test_worker_is_stopped_past_its_lease(url: str, tmp_path: Path) -> None:
    """Another worker has its trial then, so its writes are refused."""
    config = study(1, pruner={"name": "none"})
    [stopped] = start_workers(url, config, tmp_path, 2.0, count=1)
    wait_for_steps(tmp_path, 30)
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        other = start_process(work, url, config, tmp_path, "node-9", 2.0)
        wait_for(lambda: len(log_of(tmp_path, "started")) == 2)
        wait_for_steps(tmp_path, 40)
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    finish(stopped, other)
    assert [line["pid"] for line in log_of(tmp_path, "lost")] == [stopped.pid]
    assert [line["pid"] for line in log_of(tmp_path, "ended")] == [other.pid]
    check_whole(url, config, tmp_path)


def test_stop_while_the_database_is_away(postgres_server: PostgresServer, url: str, tmp_path: Path) -> None:
    """`hpo run` writes its checkpoint and leaves. The next run continues there."""
    num_steps = 400  # with fewer, a trial on a busy machine has ended before the server stops
    write_long_study(tmp_path, 0.1, n_trials=1, max_steps=num_steps)
    process = start_hpo(tmp_path, "run", "tiny.yaml", HPO_STORAGE=url)
    wait_until(lambda: saved_steps(tmp_path)[-1:] >= [5], process)
    with postgres_server.connect("postgres") as server:
        server.execute("CHECKPOINT")  # a crash may lose the last commits, with the parameters
    postgres_server.stop(immediate=True)
    try:
        process.terminate()
        stopped = finish_command(process, seconds=60)
    finally:
        postgres_server.start()
    assert stopped.exit_code == 130, stopped
    assert "told to stop while the database is away" in stopped.err
    assert "Traceback" not in stopped.err
    newest = saved_steps(tmp_path)[-1]
    with open_storage(url) as storage:
        assert [trial.state for trial in read_study(storage, "tiny").trials] == ["RUNNING"]

    write_long_study(tmp_path, 30, n_trials=1, max_steps=num_steps)
    ok(finish_command(start_hpo(tmp_path, "run", "tiny.yaml", HPO_STORAGE=url)))
    with open_storage(url) as storage:
        [trial] = read_study(storage, "tiny").trials
    assert trial.outcome == "complete"
    assert trial.telemetry.get("resumed_from_step") == newest, trial.telemetry
