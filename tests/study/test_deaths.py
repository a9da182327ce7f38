from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from worker_process import change_worker, study

from hpo.study.deaths import OUT_OF_MEMORY, counted_cause, last_saved_step, num_oom_kills, record_death
from hpo.study.leases import WorkerLease
from hpo.study.process import this_machine
from hpo.study.schema import workers
from hpo.study.storage import Storage

RISEN = -1
"""Less than any kernel counts: as if it had killed a process since."""


@pytest.fixture(autouse=True)
def _kernel_that_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(num_oom_kills, "__defaults__", (tmp_path / "vmstat",))
    (tmp_path / "vmstat").write_text("nr_free_pages 1\noom_kill 5\npswpin 7\n")


def test_kernel_without_a_count(tmp_path: Path) -> None:
    assert num_oom_kills() == 5
    assert num_oom_kills(tmp_path / "absent") is None
    (tmp_path / "vmstat").write_text("nr_free_pages 1\n")
    assert num_oom_kills() is None
    assert counted_cause(dead(oom_kills=5), outlived=False) is None


def dead(**changes: Any) -> Any:
    row = {"machine": this_machine(), "cause": None, "oom_kills": 5}
    return SimpleNamespace(**{**row, **changes})


@pytest.mark.parametrize(
    ("row", "outlived", "cause"),
    [
        (dead(), False, None),
        (dead(), True, "unknown"),
        (dead(cause="SIGKILL"), False, None),
        (dead(cause="SIGKILL"), True, "SIGKILL"),
        (dead(cause="SIGSEGV"), False, "SIGSEGV"),
        (dead(cause=OUT_OF_MEMORY, machine="elsewhere"), False, OUT_OF_MEMORY),
        (dead(oom_kills=RISEN), False, OUT_OF_MEMORY),
        (dead(oom_kills=None), False, None),
        (dead(oom_kills=RISEN, machine="rebooted/1/2"), True, None),
        (dead(oom_kills=RISEN, machine=f"{this_machine()}-another-container"), False, OUT_OF_MEMORY),
        (dead(machine=f"{this_machine()}-another-container"), True, None),
        (dead(machine="elsewhere"), True, None),
    ],
)
def test_which_deaths_count(row: Any, outlived: bool, cause: str | None) -> None:
    assert counted_cause(row, outlived=outlived) == cause


@pytest.mark.parametrize(
    ("exit_code", "oom_kills", "state", "cause"),
    [
        (-signal.SIGSEGV, 5, "dead", "SIGSEGV"),
        (-signal.SIGKILL, 5, "dead", "SIGKILL"),
        (-signal.SIGKILL, RISEN, "dead", OUT_OF_MEMORY),
        (1, 5, "live", None),
    ],
)
def test_death_that_the_parent_process_saw(
    storage: Storage, exit_code: int, oom_kills: int, state: str, cause: str | None
) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        opened = storage.create_or_resume_study(study(1))
        with WorkerLease(storage, opened, max_retries=0) as worker:
            change_worker(storage, worker, pid=child.pid, oom_kills=oom_kills)
            record_death(storage, child.pid, exit_code)
            with storage.engine.connect() as connection:
                stored = connection.execute(sa.select(workers.c.state, workers.c.cause)).one()
    assert tuple(stored) == (state, cause)


def test_last_saved_step(tmp_path: Path) -> None:
    assert last_saved_step(tmp_path / "absent") == 0
    for name in ("step-00000090", "step-00000120", "best-00000500", "step-00000900.tmp"):
        (tmp_path / name).mkdir()
    assert last_saved_step(tmp_path) == 120
