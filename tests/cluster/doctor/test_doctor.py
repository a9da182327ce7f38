from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from optuna.trial import TrialState, create_trial
from support.worker_process import begin, result, study

from hpo.cluster.doctor.doctor import Finding, examine
from hpo.errors import StorageError
from hpo.study.checkpoints.checkpoint_folders import note_database
from hpo.study.claims.leases import WorkerLease
from hpo.study.store.schema import claims
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study

GIB = 2**30


@pytest.fixture
def storage(sqlite_url: str) -> Iterator[Storage]:
    with open_storage(sqlite_url) as opened:
        create_or_resume_study(opened, study(3))
        yield opened


@pytest.fixture
def either_storage(storage_url: str) -> Iterator[Storage]:
    """On PostgreSQL too, for what tables are there."""
    with open_storage(storage_url) as opened:
        create_or_resume_study(opened, study(3))
        yield opened


@pytest.fixture
def host(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def found(storage: Storage | str, host: Path, **options: Any) -> list[Finding]:
    return list(examine(storage if isinstance(storage, str) else storage.url, host, **options))


def mends(storage: Storage | str, host: Path, problem: str, **options: Any) -> None:
    """That there is this problem alone, and that it is mended once and for all."""
    (one,) = found(storage, host, **options)
    assert problem in one.problem
    assert not one.mended
    (mended,) = found(storage, host, fix=True, **options)
    assert mended.problem == one.problem
    assert mended.mended
    assert found(storage, host, **options) == []


def run_trial(worker: WorkerLease, outcome: str = "complete", **values: Any) -> int:
    lease, trial = begin(worker)
    worker.record_outcome(lease, result(outcome, **values))
    return int(trial.number)


def test_nothing_is_wrong_with_a_new_study(storage: Storage, host: Path) -> None:
    assert found(storage, host) == []


# Tables


def test_tables_of_a_later_optuna_are_refused(storage: Storage, host: Path) -> None:
    with storage.engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = 'v99.0.0.a'"))
        connection.execute(sa.text("UPDATE version_info SET library_version = '99.0.0'"))
    with pytest.raises(StorageError, match=r"they are of Optuna 99\.0\.0\. Update Optuna"):
        found(storage, host, fix=True)


def test_tables_of_an_earlier_optuna_are_upgraded_as_the_message_says(storage: Storage, host: Path) -> None:
    with storage.engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = 'v3.0.0.d'"))
    with pytest.raises(StorageError, match=r"`optuna storage upgrade --storage URL`"):
        found(storage, host)
    upgrade = [Path(sys.executable).with_name("optuna"), "storage", "upgrade", "--storage", storage.url]
    subprocess.run(upgrade, check=True, capture_output=True)
    assert found(storage, host) == []


# Trials and checkpoints


def test_a_running_trial_without_a_claim_is_ended(storage: Storage, host: Path) -> None:
    opened = storage.load_study("tiny")
    opened.add_trial(create_trial(state=TrialState.RUNNING))
    with WorkerLease(storage, opened, max_retries=0) as worker:
        assert run_trial(worker) == 1
        begin(worker)
        with storage.engine.begin() as connection:
            connection.execute(sa.delete(claims).where(claims.c.trial_number == 2))
    first, second = found(storage, host)
    assert "trial 0 is RUNNING, but no worker of the study made it" in first.problem
    assert "trial 2 is RUNNING, but no worker of the study made it" in second.problem
    assert all(one.mended for one in found(storage, host, fix=True))
    trials = optuna.load_study(study_name="tiny", storage=storage.url).trials
    assert [trial.state.name for trial in trials] == ["FAIL", "COMPLETE", "FAIL"]
    assert found(storage, host) == []


def test_trials_that_wait_or_continue_are_no_finding(storage: Storage, host: Path) -> None:
    opened = storage.load_study("tiny")
    opened.enqueue_trial({"learning_rate": 1e-4})
    with WorkerLease(storage, opened, max_retries=1) as worker:
        run_trial(worker, "failed", traceback="Traceback")
        run_trial(worker, "preempted")
        opened.enqueue_trial({"learning_rate": 1e-4})
    assert found(storage, host) == []


def make_checkpoint(folder: Path, name: str = "best-00000001") -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "model.safetensors").write_bytes(b"x" * 2**20)
    return folder / name


@pytest.fixture
def trial_folder(storage: Storage, host: Path) -> Callable[[int], Path]:
    token = storage.study_token("tiny")[:8]
    note_database(host / "tiny" / f"checkpoints-{token}", storage)
    return lambda number: host / "tiny" / f"checkpoints-{token}" / f"trial-{number:05d}"


def test_checkpoints_of_no_trial_are_removed(
    storage: Storage, host: Path, trial_folder: Callable[[int], Path]
) -> None:
    with WorkerLease(storage, storage.load_study("tiny"), max_retries=0) as worker:
        complete = run_trial(worker)
        pruned = run_trial(worker, "pruned")
        _, running = begin(worker)
        for number in (complete, pruned, running.number, 7):
            make_checkpoint(trial_folder(number))
        assert [one.problem for one in found(storage, host, fix=True)] == [
            f"{trial_folder(pruned)} (1.0 MiB) is of trial {pruned}, which is not one of the best.",
            f"{trial_folder(7)} (1.0 MiB) is of trial 7, which is not of this study.",
        ]
        left = sorted(path.name for path in trial_folder(0).parent.glob("trial-*"))
        assert left == [trial_folder(complete).name, trial_folder(running.number).name]
        assert found(storage, host) == []


def test_checkpoints_of_a_deleted_study_are_removed_if_they_were_of_this_database(
    storage: Storage, host: Path, trial_folder: Callable[[int], Path], tmp_path: Path
) -> None:
    with WorkerLease(storage, storage.load_study("tiny"), max_retries=0) as worker:
        make_checkpoint(trial_folder(run_trial(worker)))
    orphan = shutil.copytree(trial_folder(0).parent, host / "gone" / "checkpoints-0badcafe")
    of_another = shutil.copytree(trial_folder(0).parent, host / "tiny" / "checkpoints-deadbeef")
    with open_storage(f"sqlite:///{tmp_path}/other.db") as other:
        note_database(of_another, other)
    of_whom = shutil.copytree(trial_folder(0).parent, host / "tiny" / "checkpoints-12345678")
    (of_whom / "database").unlink()
    mends(storage, host, f"{orphan} (1.0 MiB) is of a study that this database does not have.")
    assert not orphan.exists()
    assert of_another.exists()
    assert of_whom.exists()
    assert trial_folder(0).exists()
