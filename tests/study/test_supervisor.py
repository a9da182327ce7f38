"""The workers of one machine: where each runs, how they are started again, how a failure is reported."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
import worker_process
from postgres import PostgresServer
from worker_process import store_seconds, study, wait_for

from hpo.errors import InputError, RunError
from hpo.study import supervisor
from hpo.study.deaths import MAX_DEATHS
from hpo.study.schema import workers
from hpo.study.stopping import Stop
from hpo.study.storage import Storage, open_storage
from hpo.study.supervisor import WorkerPlace, place_workers, run_workers, worker_command

TWO = place_workers(2, ())


def test_place_as_environment() -> None:
    assert WorkerPlace(2).environment == {"HPO_WORKERS_ON_DEVICE": "2"}
    assert WorkerPlace(1, "MIG-a").environment == {
        "HPO_WORKERS_ON_DEVICE": "1",
        "CUDA_VISIBLE_DEVICES": "MIG-a",
    }


@pytest.mark.parametrize(
    ("num_workers", "devices", "shares"),
    [
        (2, (), [{0, 2}, {4, 5, 7}]),
        (5, (), [{0}, {2}, {4}, {5}, {7}]),
        (6, (), [set()] * 6),  # more than there are
        (1, (), [set()]),
        (2, ("0",), [set()] * 2),
    ],
)
def test_workers_on_the_cpu_have_their_own_cores(
    num_workers: int, devices: tuple[str, ...], shares: list[set[int]]
) -> None:
    places = place_workers(num_workers, devices, cores=[0, 2, 4, 5, 7])
    assert [place.cores for place in places] == shares
    assert [place.workers_on_device for place in places] == [num_workers] * num_workers


@pytest.fixture
def use_command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let `run_workers` start `python` with these arguments instead of `hpo worker`."""

    def use(*arguments: object) -> None:
        command = [sys.executable, *map(str, arguments)]
        monkeypatch.setattr(supervisor, "worker_command", lambda *_: command)

    return use


def log_of(folder: Path, number: int = 0) -> Path:
    return folder / "tiny" / f"worker-{socket.gethostname()}-{number}.log"


def test_worker_command_does_not_show_the_url() -> None:
    command = worker_command("multitask", 60.0, 0.0)
    given = ["--timeout", "60.0", "--until", "1970-01-01T00:00:00+00:00"]
    assert command[1:] == ["-m", "hpo", "worker", "multitask", *given]


def test_configuration_that_kills_its_process_costs_itself_alone(
    sqlite_url: str, tmp_path: Path, use_command: Callable[..., None]
) -> None:
    """Its worker is started again, and the configuration is not."""
    config, log = study(4), tmp_path / "log"
    use_command(worker_process.__file__, log, 4, int(signal.SIGSEGV))
    with open_storage(sqlite_url) as storage:
        opened = storage.create_or_resume_study(config)
        summary = run_workers(config, storage, tmp_path, TWO, max_restarts=10)
        crashed = [trial.number for trial in opened.trials if trial.params["fp_precision"] == "fp16"]
        assert 0 < len(crashed) < 4
        assert summary.ended == "finished"
        assert summary.outcomes["crashed"] == len(crashed)
        worker_process.check_done(storage, config, log, crashed)
        with storage.engine.connect() as connection:
            dead = (
                connection.execute(sa.select(workers.c.cause).where(workers.c.state == "dead"))
                .scalars()
                .all()
            )
        assert len(dead) >= MAX_DEATHS * len(crashed)
        assert set(dead) == {"SIGSEGV"}
        starts = sum(log_of(tmp_path, number).read_text().count("--- a worker starts") for number in range(2))
        assert starts == 2 + len(dead)


def test_restarts_are_used_up(
    storage: Storage, tmp_path: Path, use_command: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """Then the other workers are told to leave, and the error says how often it was tried."""
    script = "import os, sys; sys.stdin.read(); print('told to leave'); raise SystemExit(130)"
    lock = tmp_path / "first"
    use_command(
        "-c",
        f"import os; print('no such device')\ntry: os.mkdir({str(lock)!r})\n"
        f"except FileExistsError: os.kill(os.getpid(), 9)\n{script}",
    )
    storage.create_or_resume_study(study(2))
    with pytest.raises(RunError) as raised:
        run_workers(study(2), storage, tmp_path, TWO, max_restarts=2)
    error = str(raised.value)
    again = (
        "was killed by SIGKILL before the study was done, having been started again 2 times within an hour"
    )
    assert again in error
    logs = sorted((log_of(tmp_path, number).read_text() for number in range(2)), key=len)
    assert [log.count("--- a worker starts") for log in logs] == [1, 3]
    assert "told to leave" in logs[0]
    assert [record.message.split("; ")[1].split(".")[0] for record in caplog.records] == [
        "it is started again (1 of at most 2 times an hour)",
        "it is started again (2 of at most 2 times an hour)",
    ]


def test_restarts_of_more_than_an_hour_ago_do_not_count(
    storage: Storage, tmp_path: Path, use_command: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "RESTART_SECONDS", 0.0)
    starts = tmp_path / "starts"
    use_command("-c", f"f = open({str(starts)!r}, 'a'); f.write('x'); f.flush(); exit(f.tell() < 4)")
    storage.create_or_resume_study(study(2))
    assert run_workers(study(2), storage, tmp_path, TWO[:1], max_restarts=1).ended == "elsewhere"
    assert starts.read_text() == "xxxx"


@pytest.mark.parametrize(("code", "kind"), [(2, InputError), (1, RunError)])
def test_logs_of_workers_are_added_to(
    storage: Storage, tmp_path: Path, use_command: Callable[..., None], code: int, kind: type[Exception]
) -> None:
    """And a failure is reported with what the log says of this run; wrong input is not tried again."""
    log = log_of(tmp_path)
    log.parent.mkdir()
    log.write_text("what the first run said\n")
    use_command("-c", f"print('Error: no such column'); raise SystemExit({code})")
    storage.create_or_resume_study(study(2))
    max_restarts = 5 if code == 2 else 0
    with pytest.raises(kind, match=rf"ended with exit code {code} before the study was done\.") as raised:
        run_workers(study(2), storage, tmp_path, TWO, max_restarts=max_restarts)
    assert type(raised.value) is kind
    assert "Error: no such column" in str(raised.value)
    assert "what the first run said" not in str(raised.value)
    first, started, error = log.read_text().splitlines()
    assert (first, error) == ("what the first run said", "Error: no such column")
    assert started.startswith("--- a worker starts, 20")


@pytest.mark.parametrize(
    ("code", "timeout", "ended"),
    [
        (0, None, "elsewhere"),
        (0, 1e-6, "timeout"),
        (130, None, "stopped"),  # told to by somebody else
    ],
)
def test_workers_that_leave_trials_open(
    storage: Storage,
    tmp_path: Path,
    use_command: Callable[..., None],
    code: int,
    timeout: float | None,
    ended: str,
) -> None:
    use_command("-c", f"raise SystemExit({code})")
    config, stop = study(2, timeout=timeout), Stop()
    storage.create_or_resume_study(config)
    summary = run_workers(config, storage, tmp_path, TWO, stop=stop, max_restarts=5)
    assert (summary.ended, summary.exit_code, summary.outcomes) == (ended, code, {})
    assert not stop.asks_for_requeue
    assert log_of(tmp_path).read_text().count("--- a worker starts") == 1


@pytest.mark.parametrize(("code", "ended", "again"), [(130, "stopped", True), (0, "timeout", False)])
def test_workers_that_leave_before_the_end_of_the_job(
    storage: Storage, tmp_path: Path, use_command: Callable[..., None], code: int, ended: str, again: bool
) -> None:
    """With exit code 0 none had time for a trial at its beginning, and the next job would have no more."""
    use_command("-c", f"raise SystemExit({code})")
    storage.create_or_resume_study(study(2))
    store_seconds(storage, (40.0,))
    stop = Stop(time.time() + 3600)
    stop.reserve(3600 - 60)
    summary = run_workers(study(2), storage, tmp_path, TWO, stop=stop, max_restarts=5)
    assert (summary.ended, stop.asks_for_requeue) == (ended, again)


def test_workers_run_on_their_cores(
    storage: Storage, tmp_path: Path, use_command: Callable[..., None]
) -> None:
    core = min(os.sched_getaffinity(0))
    # It may look before its parent has set them.
    use_command(
        "-c",
        "import os, time; end = time.time() + 60\n"
        "while len(os.sched_getaffinity(0)) > 1 and time.time() < end: time.sleep(0.01)\n"
        "print(sorted(os.sched_getaffinity(0)))",
    )
    storage.create_or_resume_study(study(2))
    run_workers(study(2), storage, tmp_path, [WorkerPlace(1, cores=frozenset([core]))])
    assert json.loads(log_of(tmp_path).read_text().splitlines()[-1]) == [core]


@pytest.mark.parametrize("given", [None, "@file"])
def test_storage_reaches_a_worker_as_it_was_given(
    storage: Storage, tmp_path: Path, use_command: Callable[..., None], given: str | None
) -> None:
    use_command("-c", "import os; print(os.environ['HPO_STORAGE'])")
    storage.create_or_resume_study(study(2))
    run_workers(study(2), storage, tmp_path, TWO, storage_as_given=given)
    assert log_of(tmp_path).read_text().splitlines()[-1] == (given or storage.url)


@pytest.mark.postgres
def test_a_supervisor_waits_for_no_database(
    own_server: PostgresServer,
    tmp_path: Path,
    use_command: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A worker that dies is started again when its death is recorded; told to stop, all may leave."""
    use_command(
        "-c",
        "import os, pathlib, sys, threading, time\nprint('runs', flush=True)\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "def die():\n"
        "    while not (folder / 'die').exists(): time.sleep(0.01)\n"
        "    (folder / 'die').unlink(); os.kill(os.getpid(), 9)\n"
        "if not list(folder.glob('first')):\n"
        "    (folder / 'first').touch(); threading.Thread(target=die, daemon=True).start()\n"
        "sys.stdin.read(); print('told to leave'); raise SystemExit(130)",
    )

    def runs(count: int) -> bool:
        logs = [log_of(tmp_path, number) for number in range(2)]
        return sum(log.read_text().count("runs") for log in logs if log.exists()) == count

    def said(what: str, count: int) -> bool:
        return sum(record.message.startswith(what) for record in caplog.records) == count

    stop = Stop()
    with own_server.database() as url, open_storage(url) as storage, ThreadPoolExecutor(1) as thread:
        storage.create_or_resume_study(study(2))
        try:
            ended = thread.submit(run_workers, study(2), storage, tmp_path, TWO, stop=stop, max_restarts=5)
            wait_for(lambda: runs(2))
            own_server.stop(immediate=True)
            (tmp_path / "die").touch()
            wait_for(lambda: said("The database is away", 1))
            assert said("Worker", 0)
            own_server.start()
            wait_for(lambda: runs(3))
            assert said("Worker", 1)
            own_server.stop(immediate=True)
        finally:
            stop.set()
        assert ended.result(60).ended == "stopped"
        own_server.start()
    logs = [log_of(tmp_path, number).read_text() for number in range(2)]
    assert [log.splitlines()[-1] for log in logs] == ["told to leave"] * 2


def test_workers_may_checkpoint_when_their_supervisor_fails(
    storage: Storage, tmp_path: Path, use_command: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        wait_for(lambda: all(log_of(tmp_path, number).read_text().count("runs") for number in range(2)))
        raise OSError("no more processes")

    monkeypatch.setattr(supervisor, "_supervise", fail)
    use_command("-c", "import sys; print('runs', flush=True); sys.stdin.read(); print('told to leave')")
    storage.create_or_resume_study(study(2))
    with pytest.raises(OSError, match="no more processes"):
        run_workers(study(2), storage, tmp_path, TWO)
    logs = [log_of(tmp_path, number).read_text() for number in range(2)]
    assert [log.splitlines()[-1] for log in logs] == ["told to leave"] * 2
