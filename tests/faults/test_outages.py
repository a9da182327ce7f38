"""Outages of a real PostgreSQL, of the network and of workers in real processes; a shared PgBouncer.

The trials train nothing, but use the real `TrialRunner` and lease. In an outage, each worker pretends to have
a machine of its own, so that only heartbeats prove its life.
"""

import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from support.command_line import finish as finish_command
from support.command_line import ok, saved_steps, start_hpo, wait_until
from support.one_connection import one_connection
from support.postgres import PGBOUNCER, PostgresServer, stopped, transaction_pool
from support.proxy import Proxy
from support.tiny import write_long_study
from support.worker_process import (
    check_done,
    finish,
    note,
    notes,
    result,
    scored,
    start_process,
    study,
    wait_for,
    work,
)

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


class Train:
    """A simulated Executor: each evaluation has a checkpoint."""

    def __init__(self, config: StudyConfig, folder: Path) -> None:
        self.study, self._folder = config, folder
        self.device = SimpleNamespace(device_id="cpu")

    def trial_folder(self, _token: str, number: int) -> Path:
        return self._folder / f"trial-{number:05d}"

    def run(self, _params: Any, folder: Path, _key: str, callbacks: Any, **_: Any) -> Any:
        number = int(folder.name.removeprefix("trial-"))
        tell = partial(note, self._folder / "log", number=number, pid=os.getpid())
        start = max((int(path.name.removeprefix("step-")) for path in folder.glob("step-*")), default=0)
        tell(event="started", step=start)
        try:
            for step in range(start + 1, STEPS + 1):
                time.sleep(0.05)
                if step in EVALUATED:
                    share = step / STEPS
                    callbacks.on_evaluation(scored(EVALUATED.index(step) + 1, step, share, (share,)))
                    (folder / f"step-{step:08d}").mkdir(parents=True)
                tell(event="step", step=step)
                if callbacks.should_stop():
                    return result("preempted")
        except LeaseLostError:
            tell(event="lost", step=step)
            raise
        tell(event="ended", step=STEPS)
        return result("complete", telemetry={"device": {}})


def be_elsewhere(url: str, config: StudyConfig, folder: Path, machine: str, lease_seconds: float) -> None:
    """Be a worker on a machine of its own until the study is done."""
    socket.gethostname = lambda: machine
    BoundedConnection.answer_seconds = min(lease_seconds / 2, BoundedConnection.answer_seconds)
    connection.IDLE_SECONDS = 5.0  # frees the locks of a stopped worker
    stop = Stop()
    with open_storage(url, stop=stop) as storage:
        storage.lease_seconds = lease_seconds
        executor: Any = Train(config, folder)
        runner, options = TrialRunner(executor, storage, stop), WorkerOptions(poll_seconds=0.2)
        run_worker(config, storage, runner, options, stop=stop)


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


@pytest.fixture
def url(postgres_server: PostgresServer, postgres_url: str) -> str:
    """A database that keeps every commit in a crash of its server."""
    name = postgres_url.rpartition("/")[2]
    with postgres_server.connect("postgres") as server:
        server.execute(f"ALTER DATABASE {name} SET synchronous_commit = on")
    return postgres_url


def start_workers(url: str, config: StudyConfig, folder: Path, *args: float, count: int = 3) -> list[Any]:
    with open_storage(url) as storage:
        create_or_resume_study(storage, config)
    machines = [f"node-{number}" for number in range(count)]
    workers = [start_process(be_elsewhere, url, config, folder, machine, *args) for machine in machines]
    pids = {worker.pid for worker in workers}
    wait_for(lambda: pids <= {line["pid"] for line in log_of(folder, "started")}, 180)
    return workers


def wait_for_steps(folder: Path, more: int) -> None:
    enough = len(log_of(folder, "step")) + more
    wait_for(lambda: len(log_of(folder, "step")) >= enough, 180)  # on a loaded machine


@pytest.mark.parametrize("lost", ["server", "network"])
def test_outages_longer_than_a_lease(
    postgres_server: PostgresServer, url: str, tmp_path: Path, lost: str
) -> None:
    """After a silence of the network, earlier connections stay half-open for ever."""
    config = study(8, pruner={"name": "none"})
    with Proxy(postgres_server.port) as proxy:
        through = re.sub(r":\d+/", f":{proxy.port}/", url) + "?connect_timeout=2"
        workers = start_workers(through if lost == "network" else url, config, tmp_path, 2.0)
        for _ in range(2):
            wait_for_steps(tmp_path, 50)
            if lost == "network":
                proxy.silence(True)
                time.sleep(3.5)
                proxy.silence(False)
            else:
                with stopped(postgres_server):
                    time.sleep(3.0)
        finish(*workers)
    check_whole(url, config, tmp_path)
    started = Counter(line["number"] for line in log_of(tmp_path, "started"))
    assert started == dict.fromkeys(range(config.n_trials), 1)


def test_worker_is_stopped_past_its_lease(url: str, tmp_path: Path) -> None:
    """Another worker has its trial then, so its writes are refused."""
    config = study(1, pruner={"name": "none"})
    [halted] = start_workers(url, config, tmp_path, 2.0, count=1)
    wait_for_steps(tmp_path, 30)
    os.kill(halted.pid, signal.SIGSTOP)
    try:
        other = start_process(be_elsewhere, url, config, tmp_path, "node-9", 2.0)
        wait_for(lambda: len(log_of(tmp_path, "started")) == 2)
        wait_for_steps(tmp_path, 40)
    finally:
        os.kill(halted.pid, signal.SIGCONT)
    finish(halted, other)
    assert [line["pid"] for line in log_of(tmp_path, "lost")] == [halted.pid]
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
    with stopped(postgres_server):
        process.terminate()
        left = finish_command(process, seconds=60)
    assert left.exit_code == 130, left
    assert "told to stop while the database is away" in left.err
    assert "Traceback" not in left.err
    newest = saved_steps(tmp_path)[-1]
    with open_storage(url) as storage:
        assert [trial.state for trial in read_study(storage, "tiny").trials] == ["RUNNING"]

    write_long_study(tmp_path, 30, n_trials=1, max_steps=num_steps)
    ok(finish_command(start_hpo(tmp_path, "run", "tiny.yaml", HPO_STORAGE=url)))
    with open_storage(url) as storage:
        [trial] = read_study(storage, "tiny").trials
    assert trial.outcome == "complete"
    assert trial.telemetry.get("resumed_from_step") == newest, trial.telemetry


POOL_SIZE, NUM_WORKERS = 2, 8


@pytest.fixture
def pool_url(postgres_server: PostgresServer, postgres_url: str) -> Iterator[str]:
    with transaction_pool(postgres_server, postgres_url.rpartition("/")[2], POOL_SIZE) as url:
        yield url


def be_worker(url: str, config: StudyConfig, log: Path) -> None:
    with one_connection():
        work(url, config, log, trial_seconds=0.05)


def settings_of_all(url: str) -> list[dict[str, str]]:
    """Return the settings of the server's connections, as another program sees them."""
    with ExitStack() as programs:  # each keeps its transaction open
        connect = partial(psycopg.connect, url, prepare_threshold=None, application_name="other")
        others = [programs.enter_context(connect()) for _ in range(POOL_SIZE)]
        return [dict(other.execute("SELECT name, setting FROM pg_settings").fetchall()) for other in others]


@pytest.mark.skipif(PGBOUNCER is None, reason="pgbouncer is not installed")
def test_workers_share_two_connections(pool_url: str, tmp_path: Path) -> None:
    """They leave no settings of a session to other programs."""
    config, log = study(24), tmp_path / "log"
    before = settings_of_all(pool_url)
    finish(*(start_process(be_worker, pool_url, config, log) for _ in range(NUM_WORKERS)))
    assert settings_of_all(pool_url) == before
    with open_storage(pool_url) as storage:
        check_done(storage, config, log)
        assert len(read_study(storage, config.name).workers) == NUM_WORKERS
