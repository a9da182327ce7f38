"""Worker processes of one machine: where each runs, how they are stopped, how a failure is reported."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
import worker_process
from worker_process import study

from hpo.errors import InputError, RunError
from hpo.study import processes
from hpo.study.processes import WorkerPlace, place_workers, run_workers
from hpo.study.schema import workers
from hpo.study.storage import Storage

TWO = place_workers(2, ())


def test_place_as_environment() -> None:
    assert WorkerPlace(2).environment == {"HPO_WORKERS_ON_DEVICE": "2"}
    assert WorkerPlace(1, "MIG-a").environment == {
        "HPO_WORKERS_ON_DEVICE": "1",
        "CUDA_VISIBLE_DEVICES": "MIG-a",
    }


@pytest.fixture
def use_command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let `run_workers` start `python` with these arguments instead of `hpo worker`."""

    def use(*arguments: object) -> None:
        command = [sys.executable, *map(str, arguments)]
        monkeypatch.setattr(processes, "worker_command", lambda *_: command)

    return use


def test_worker_command_does_not_show_the_url() -> None:
    command = processes.worker_command("multitask", 60.0)
    assert command[1:] == ["-m", "hpo", "worker", "multitask", "--timeout", "60.0"]


def test_run_workers_notes_how_its_workers_died(
    storage: Storage, tmp_path: Path, use_command: Callable[..., None]
) -> None:
    use_command(worker_process.__file__, tmp_path / "log", 8, int(signal.SIGSEGV))
    storage.create_or_resume_study(study(8))
    with pytest.raises(RunError, match="was killed by signal 11"):
        run_workers(study(8), storage, tmp_path, TWO)
    with storage.engine.connect() as connection:
        stored = connection.execute(sa.select(workers.c.state, workers.c.cause)).all()
    assert [tuple(row) for row in stored] == [("dead", "SIGSEGV")] * 2


@pytest.mark.parametrize(("code", "kind"), [(2, InputError), (1, RunError)])
def test_logs_of_workers_are_added_to(
    storage: Storage, tmp_path: Path, use_command: Callable[..., None], code: int, kind: type[Exception]
) -> None:
    """And a failure of all workers is reported with what the log says of this run."""
    log = tmp_path / "tiny" / "worker-0.log"
    log.parent.mkdir()
    log.write_text("what the first run said\n")
    use_command("-c", f"print('Error: no such column'); raise SystemExit({code})")
    storage.create_or_resume_study(study(2))
    with pytest.raises(kind, match=rf"ended with exit code {code} before the study was done") as raised:
        run_workers(study(2), storage, tmp_path, TWO)
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
    config = study(2, timeout=timeout)
    storage.create_or_resume_study(config)
    summary = run_workers(config, storage, tmp_path, TWO)
    assert (summary.ended, summary.exit_code, summary.outcomes) == (ended, code, {})
