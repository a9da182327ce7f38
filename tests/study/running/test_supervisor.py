"""The workers of one machine: their devices, restarts, logs and failures."""

import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.postgres import PostgresServer, stopped
from support.tiny import CPU, GPU
from support.worker_process import study, wait_for

from hpo.config.study_config import StudyConfig
from hpo.device import DeviceInfo
from hpo.errors import InputError, RunError
from hpo.study.running import supervisor
from hpo.study.running.stopping import RunSummary, Stop
from hpo.study.running.supervisor import (
    DeviceShare,
    WorkerProcesses,
    run_workers,
    share_devices,
    share_memory,
)
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study

RunProgram = Callable[..., RunSummary]
TWO = [DeviceShare(2)] * 2
STUDY = study(2)


@pytest.fixture
def run(storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunProgram:
    """Runs two workers of a study, each a Python program in place of `hpo worker`."""

    def run(program: str, config: StudyConfig = STUDY, stop: Stop | None = None) -> RunSummary:
        monkeypatch.setattr(supervisor, "worker_command", lambda *_: [sys.executable, "-c", program])
        create_or_resume_study(storage, config)
        return run_workers(config, storage, tmp_path, WorkerProcesses(TWO), stop or Stop())

    return run


def log_of(folder: Path, number: int = 0) -> str:
    [log] = (folder / "tiny").glob(f"worker-{socket.gethostname()}-*-{number}.log")
    return log.read_text()


def test_too_many_restarts_end_the_other_workers(
    run: RunProgram, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "MAX_RESTARTS", 2)
    program = (
        "import os, sys; print('no such device')\n"
        f"try: os.mkdir({str(tmp_path / 'first')!r})\n"
        "except FileExistsError: os.kill(os.getpid(), 9)\n"
        "sys.stdin.read(); print('told to leave'); raise SystemExit(130)"
    )
    again = "killed by SIGKILL before the study was done, having been started again 2 times within an hour"
    with pytest.raises(RunError, match=again):
        run(program)
    logs = sorted((log_of(tmp_path, number) for number in range(2)), key=len)
    assert [log.count("--- a worker starts") for log in logs] == [1, 3]
    assert "told to leave" in logs[0]
    assert caplog.text.count("it is started again") == 2


@pytest.mark.parametrize(
    ("code", "timeout", "job_seconds", "ended"),
    [(0, None, None, "elsewhere"), (0, 1e-6, None, "timeout"), (130, None, 3600.0, "stopped")],
)
def test_end_of_workers_with_open_trials(
    run: RunProgram, tmp_path: Path, code: int, timeout: float | None, job_seconds: float | None, ended: str
) -> None:
    stop = Stop(None if job_seconds is None else time.time() + job_seconds)
    summary = run(f"raise SystemExit({code})", study(2, timeout=timeout), stop)
    assert (summary.ended, summary.exit_code, summary.outcomes) == (ended, code, {})
    assert stop.asks_for_requeue == (job_seconds is not None)
    assert log_of(tmp_path).count("--- a worker starts") == 1


def test_worker_gets_the_permissions_of_the_user_s_file(
    run: RunProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker reads the study from the database, and so needs a permission for its paths and code."""
    monkeypatch.setenv("HPO_ALLOW", "s3://ours")
    outside = tmp_path / "outside"
    changes = {"checkpoint": {"location": str(outside)}, "model": {"trust_remote_code": True}}
    run("import os, sys; print(os.environ['HPO_ALLOW'], *sys.argv[1:])", study(2, **changes))
    assert log_of(tmp_path).splitlines()[-1].split() == [f"s3://ours:{outside}", "--trust-remote-code"]


@pytest.mark.postgres
def test_dead_worker_is_restarted_after_an_outage(
    postgres_server: PostgresServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    program = (
        "import os, pathlib, sys, time\nprint('runs', flush=True)\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "if not (folder / 'first').exists():\n"
        "    (folder / 'first').touch()\n"
        "    while not (folder / 'die').exists(): time.sleep(0.01)\n"
        "    os.kill(os.getpid(), 9)\n"
        "sys.stdin.read(); print('told to leave'); raise SystemExit(130)"
    )
    monkeypatch.setattr(supervisor, "worker_command", lambda *_: [sys.executable, "-c", program])

    def said(what: str) -> int:
        return sum(record.message.startswith(what) for record in caplog.records)

    stop, processes = Stop(), WorkerProcesses(TWO[:1])
    with postgres_server.database() as url, open_storage(url) as storage, ThreadPoolExecutor(1) as thread:
        create_or_resume_study(storage, STUDY)
        try:
            ended = thread.submit(run_workers, STUDY, storage, tmp_path, processes, stop)
            wait_for((tmp_path / "first").exists)
            with stopped(postgres_server):
                (tmp_path / "die").touch()
                wait_for(lambda: said("The database is away") == 1)
                assert said("Worker") == 0
            wait_for(lambda: log_of(tmp_path).count("runs") == 2)
            assert said("Worker") == 1
        finally:
            (tmp_path / "die").touch()
            stop.set()
        assert ended.result(60).ended == "stopped"
    assert log_of(tmp_path).splitlines()[-1] == "told to leave"


@pytest.mark.parametrize(
    ("device", "num_workers", "given", "expected"),
    [(GPU, 4, None, (80 - 4) / 4 / 80), (GPU, 1, None, None), (GPU, 4, 0.2, 0.2), (CPU, 4, None, None)],
)
def test_workers_of_one_gpu_share_its_memory(
    device: DeviceInfo, num_workers: int, given: float | None, expected: float | None
) -> None:
    config = study(amp={} if given is None else {"memory_fraction": given})
    found = share_memory(config.amp, device, num_workers)
    assert found.memory_fraction == (None if expected is None else pytest.approx(expected))


def test_contexts_of_workers_need_memory() -> None:
    with pytest.raises(InputError, match=r"must be <= 0\.2375 for 4 workers .* got 0\.25\."):
        share_memory(study(amp={"memory_fraction": 0.25}).amp, GPU, 4)
    fits = study(amp={"memory_fraction": 0.2375}).amp
    assert share_memory(fits, GPU, 4) is fits


@pytest.mark.parametrize(
    ("given", "devices", "expected"),
    [
        ((None, 2), ("0", "1", "2"), [(2, "012"[number % 3]) for number in range(6)]),
        ((None, 3), (), [(3, None)] * 3),
        ((1, None), ("0", "1"), []),  # in this process
        ((3, None), ("GPU-a", "GPU-b"), [(2, "GPU-a"), (1, "GPU-b"), (2, "GPU-a")]),
    ],
)
def test_workers_take_turns_on_the_devices(
    monkeypatch: pytest.MonkeyPatch,
    given: tuple[int, int | None],
    devices: tuple[str, ...],
    expected: list[tuple[int, str | None]],
) -> None:
    monkeypatch.setattr(supervisor, "cuda_devices", lambda _: devices)
    shares = share_devices(study(2), *given)
    assert [(share.workers_on_device, share.cuda_device) for share in shares] == expected
