from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from worker_process import change_worker, study

from hpo.study.claims.deaths import last_saved_step, record_death
from hpo.study.claims.leases import WorkerLease
from hpo.study.store.schema import workers
from hpo.study.store.storage import Storage
from hpo.study.store.studies import create_or_resume_study


@pytest.mark.parametrize(
    ("exit_code", "state", "cause"),
    [(-signal.SIGSEGV, "dead", "SIGSEGV"), (-signal.SIGKILL, "dead", "SIGKILL"), (1, "live", None)],
)
def test_death_that_the_parent_process_saw(
    storage: Storage, exit_code: int, state: str, cause: str | None
) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        opened = create_or_resume_study(storage, study(1))
        with WorkerLease(storage, opened, max_retries=0) as worker:
            change_worker(storage, worker, pid=child.pid)
            record_death(storage, child.pid, exit_code)
            with storage.engine.connect() as connection:
                stored = connection.execute(sa.select(workers.c.state, workers.c.cause)).one()
    assert tuple(stored) == (state, cause)


def test_last_saved_step(tmp_path: Path) -> None:
    assert last_saved_step(tmp_path / "absent") == 0
    for name in ("step-00000090", "step-00000120", "best-00000500", "step-00000900.tmp"):
        (tmp_path / name).mkdir()
    assert last_saved_step(tmp_path) == 120
