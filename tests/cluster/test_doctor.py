from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from jsonl_sets import write_set
from old_tables import make_v1
from optuna.trial import TrialState, create_trial
from postgres import PostgresServer
from tiny import tiny_study
from worker_process import change_worker, result, study

from hpo.cluster import database_checks
from hpo.cluster.doctor import examine
from hpo.cluster.finding import Finding
from hpo.cluster.study_checks import Host
from hpo.data.dataset import load_data
from hpo.device import GpuMemory, gpu_memory
from hpo.errors import NoDatabaseError, StorageError
from hpo.study import sqlite_place
from hpo.study.checkpoint_folders import note_database
from hpo.study.database import parse_url
from hpo.study.leases import WorkerLease
from hpo.study.migrations import newest_version
from hpo.study.process import this_machine
from hpo.study.schema import slots
from hpo.study.storage import Storage, open_storage

GIB = 2**30


@pytest.fixture
def storage(storage_url: str) -> Iterator[Storage]:
    with open_storage(storage_url) as opened:
        opened.create_or_resume_study(study(3))
        yield opened


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "runs")


def found(storage: Storage | str, host: Host, **options: Any) -> list[Finding]:
    """The findings that are more than a note."""
    url = storage if isinstance(storage, str) else storage.url
    return [one for one in examine(url, host, **options) if one.severity != "note"]


def mends(storage: Storage | str, host: Host, problem: str, **options: Any) -> None:
    """That there is this problem alone, and that it is mended once and for all."""
    (one,) = found(storage, host, **options)
    assert problem in one.problem
    assert one.remains
    (mended,) = found(storage, host, fix=True, **options)
    assert mended.problem == one.problem
    assert mended.mended
    assert not mended.remains
    assert found(storage, host, **options) == []


def run_trial(worker: WorkerLease, outcome: str = "complete", **values: Any) -> int:
    lease = worker.claim()
    assert lease is not None
    trial = worker.open_trial(lease)
    assert trial is not None
    worker.record_outcome(lease, trial, result(outcome, **values))
    return trial.number


def test_nothing_is_wrong_with_a_new_study(storage: Storage, host: Host) -> None:
    (note,) = examine(storage.url, host)
    assert note == Finding(
        "note",
        "Study tiny: 3 of 3 trials are left, and no worker is in it.",
        "Go on with it: `hpo worker tiny`.",
        check="progress",
    )
    assert not note.remains


# Tables


def test_tables_of_an_earlier_version_are_moved_up(storage_url: str, host: Host) -> None:
    make_v1(storage_url)
    mends(storage_url, host, f"must be of version {newest_version()}, but are of v1")


def test_tables_of_a_later_version_are_left_alone(storage: Storage, host: Host) -> None:
    with storage.engine.begin() as connection:
        connection.execute(sa.text("UPDATE hpo_version SET version_num = 'v999'"))
    (one,) = found(storage, host, fix=True)
    assert "a later hpo has made them (v999)" in one.problem
    assert one.remains


def test_a_missing_table_is_made(storage: Storage, host: Host) -> None:
    with storage.engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE hpo_compat"))
    mends(storage, host, "The table `hpo_compat` is missing.")


def test_missing_tables_are_made_where_the_version_is_missing_too(storage: Storage, host: Host) -> None:
    with storage.engine.begin() as connection:
        for table in ("hpo_version", "hpo_compat", "hpo_jobs"):
            connection.execute(sa.text(f"DROP TABLE {table}"))
    mends(storage, host, "Tables of hpo are missing: hpo_compat, hpo_jobs.")


def test_a_column_that_differs_is_told(storage: Storage, host: Host) -> None:
    with storage.engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE hpo_evaluations DROP COLUMN train_tokens_per_second"))
        connection.execute(sa.text("ALTER TABLE hpo_jobs ADD COLUMN color TEXT"))
    problems = [one.problem for one in found(storage, host, fix=True) if one.remains]
    assert sorted(problems) == [
        "The column `hpo_evaluations.train_tokens_per_second` is missing.",
        "The column `hpo_jobs.color` is not of this hpo.",
    ]


def test_tables_of_another_optuna_are_told(storage: Storage, host: Host) -> None:
    with storage.engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = 'v99.0.0.a'"))
    (one,) = found(storage, host, fix=True)
    assert "The tables of Optuna must be of version" in one.problem
    assert "are of v99.0.0.a" in one.problem
    assert one.remedy.startswith("Update Optuna")


def test_tables_of_an_earlier_optuna_are_moved_up(storage: Storage, host: Host) -> None:
    backend = storage.optuna._backend  # type: ignore[attr-defined]
    newest, before = backend.get_head_version(), "v3.0.0.d"
    assert newest == "v3.2.0.a", "what this test takes back is no longer the last step"
    with storage.engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = :v"), {"v": before})
    mends(storage, host, f"The tables of Optuna must be of version {newest}, but are of {before}.")
    assert storage.load_study("tiny").study_name == "tiny"


# The database and its place


def test_an_absent_database_is_the_users_mistake(sqlite_url: str, host: Host) -> None:
    with pytest.raises(NoDatabaseError, match="There is no study database"):
        found(sqlite_url, host, fix=True)
    assert not Path(sqlite_url.removeprefix("sqlite:///")).exists()


@pytest.mark.postgres
def test_a_database_that_does_not_answer_is_a_finding_without_its_password(
    postgres_url: str, host: Host
) -> None:
    with pytest.raises(NoDatabaseError, match="holds no study yet"):
        found(postgres_url, host)
    (one,) = found("postgresql://me:secret@127.0.0.1:1/none", host)
    assert one.severity == "error"
    assert "no database answers there" in one.problem
    assert "secret" not in one.problem


@pytest.mark.postgres
def test_a_connection_that_others_can_read_is_told(
    postgres_url: str, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_storage(postgres_url) as storage:
        storage.create_or_resume_study(study(1))
    assert found(postgres_url, host) == []  # loopback
    monkeypatch.setattr(database_checks, "is_loopback", lambda _: False)
    (one,) = found(postgres_url, host)
    assert one.problem.endswith("the database on 127.0.0.1: there is no TLS.")


def test_sqlite_on_a_network_file_system_is_told_and_the_rest_is_still_looked_at(
    sqlite_url: str, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_storage(sqlite_url) as storage:
        storage.create_or_resume_study(study(1))
    monkeypatch.setattr(sqlite_place, "network_file_system", lambda _: "lustre")
    on_network, note = examine(sqlite_url, host, fix=True)
    assert "network file system (lustre)" in on_network.problem
    assert on_network.remains
    assert note.check == "progress"


def test_a_sqlite_database_that_two_hosts_use_is_told(sqlite_url: str, host: Host) -> None:
    with open_storage(sqlite_url) as storage:
        opened = storage.create_or_resume_study(study(1))
        with WorkerLease(storage, opened, max_retries=0) as worker:
            change_worker(storage, worker, host="node2", machine="node2/another-boot/pid:[1]")
            (one,) = found(storage, host)
            assert "Workers on node2 use this SQLite database" in one.problem
            change_worker(storage, worker, machine=this_machine())


@pytest.mark.parametrize(("seconds", "told"), [(0, ""), (1, ""), (30, "ahead of"), (-30, "behind")])
def test_clock_skew(storage: Storage, host: Host, seconds: float, told: str) -> None:
    there = Host(host.runs_dir, clock=lambda: time.time() + seconds)
    problems = [one.problem for one in found(storage, there)]
    expected = [f"The clock of this host is 30.0 s {told} the database's."] if told else []
    assert problems == expected


@pytest.mark.postgres
def test_a_user_without_rights_gets_one_message(
    postgres_server: PostgresServer, postgres_url: str, host: Host
) -> None:
    with open_storage(postgres_url) as storage:
        storage.create_or_resume_study(study(1))
    name = parse_url(postgres_url).database or ""
    with postgres_server.connect(name) as connection:
        connection.execute("CREATE ROLE reader LOGIN PASSWORD 'secret'")
    try:
        with pytest.raises(
            StorageError, match="must be allowed to create tables and to write them"
        ) as refused:
            found(postgres_server.url(name, "reader", "secret"), host, fix=True)
        assert "secret" not in str(refused.value)
    finally:
        with postgres_server.connect(name) as connection:
            connection.execute("DROP ROLE reader")


# Trials and checkpoints


def test_a_slot_of_a_dead_worker_is_opened(storage: Storage, host: Host) -> None:
    opened = storage.load_study("tiny")
    with (
        WorkerLease(storage, opened, max_retries=0) as dead,
        WorkerLease(storage, opened, max_retries=0) as one,
    ):
        for worker in (dead, one):
            lease = worker.claim()
            assert lease is not None
            worker.open_trial(lease)
        change_worker(storage, dead, process_start="1")
        mends(storage, host, f"slot 0 (trial 0) is with a dead worker, {dead.id}.")
        assert storage.slot_counts("tiny") == {"open": 2, "running": 1, "done": 0}
        assert [trial.state for trial in opened.trials] == [TrialState.RUNNING] * 2, "they go on"
        change_worker(storage, dead, process_start=dead.id)


def test_a_slot_that_was_taken_over_meanwhile_is_left_alone(storage: Storage, host: Host) -> None:
    opened = storage.load_study("tiny")
    with (
        WorkerLease(storage, opened, max_retries=0) as dead,
        WorkerLease(storage, opened, max_retries=0) as peer,
    ):
        dead.claim()
        change_worker(storage, dead, process_start="1")
        with closing(examine(storage.url, host)) as examination:
            stale = next(examination)
            lease = peer.claim()
            assert lease is not None
            assert lease.slot == 0
            assert stale.mend is not None
            stale.mend()
        with storage.engine.connect() as connection:
            row = connection.execute(sa.select(slots).where(slots.c.slot == 0)).one()
        assert (row.state, row.owner) == ("running", peer.id)


def test_a_running_trial_without_a_slot_is_ended(storage: Storage, host: Host) -> None:
    opened = storage.load_study("tiny")
    opened.add_trial(create_trial(state=TrialState.RUNNING))
    with WorkerLease(storage, opened, max_retries=0) as worker:
        run_trial(worker)
        lease = worker.claim()
        assert lease is not None
        worker.open_trial(lease)
        with storage.engine.begin() as connection:  # as a lowered `n_trials` did before
            connection.execute(sa.delete(slots).where(slots.c.slot == 1))
    first, second = found(storage, host)
    assert "trial 0 is RUNNING, but no slot" in first.problem
    assert "trial 2 is RUNNING, but no slot" in second.problem
    assert all(one.mended for one in found(storage, host, fix=True))
    with open_storage(storage.url, create=False) as fresh:  # what a process owns it does not read again
        trials = fresh.load_study("tiny").trials
    assert [trial.state.name for trial in trials] == ["FAIL", "COMPLETE", "FAIL"]
    assert found(storage, host) == []


def make_checkpoint(folder: Path, name: str = "best-00000001") -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "model.safetensors").write_bytes(b"x" * 2**20)
    return folder / name


@pytest.fixture
def trial_folder(storage: Storage, host: Host) -> Callable[[int], Path]:
    token = storage.study_token("tiny")[:8]
    note_database(host.runs_dir / "tiny" / f"checkpoints-{token}", storage)
    return lambda number: host.runs_dir / "tiny" / f"checkpoints-{token}" / f"trial-{number:05d}"


def test_checkpoints_of_no_trial_are_removed(
    storage: Storage, host: Host, trial_folder: Callable[[int], Path]
) -> None:
    with WorkerLease(storage, storage.load_study("tiny"), max_retries=0) as worker:
        complete = run_trial(worker)
        pruned = run_trial(worker, "pruned")
        lease = worker.claim()
        assert lease is not None
        running = worker.open_trial(lease)
        assert running is not None
        for number in (complete, pruned, running.number, 7):
            make_checkpoint(trial_folder(number))
        being_written = make_checkpoint(trial_folder(running.number), ".step-00000002.1.tmp")
        left_behind = make_checkpoint(trial_folder(complete), ".best-00000002.1.tmp")
        problems = [one.problem for one in found(storage, host, fix=True)]
        assert problems == [
            f"{left_behind} (1.0 MiB) was not written to its end.",
            f"{trial_folder(pruned)} (1.0 MiB) is of trial 00001, none of the 3 best.",
            f"{trial_folder(7)} (1.0 MiB) is of trial 00007, which the study does not have.",
        ]
        left = sorted(path.name for path in trial_folder(0).parent.glob("trial-*"))
        assert left == ["trial-00000", "trial-00002"]
        assert being_written.exists()
        assert not left_behind.exists()
        assert found(storage, host) == []
        change_worker(storage, worker, process_start="1")
        assert [one.check for one in found(storage, host, fix=True)] == ["stale trials", "checkpoints"]
        assert not being_written.exists()
        assert make_checkpoint(trial_folder(running.number), "step-00000002").exists()
        assert found(storage, host) == []


def test_checkpoints_of_a_deleted_study_are_removed_if_they_were_of_this_database(
    storage: Storage, host: Host, trial_folder: Callable[[int], Path], tmp_path: Path
) -> None:
    with WorkerLease(storage, storage.load_study("tiny"), max_retries=0) as worker:
        make_checkpoint(trial_folder(run_trial(worker)))
    orphan = shutil.copytree(trial_folder(0).parent, host.runs_dir / "gone" / "checkpoints-0badcafe")
    of_another = shutil.copytree(trial_folder(0).parent, host.runs_dir / "tiny" / "checkpoints-deadbeef")
    with open_storage(f"sqlite:///{tmp_path}/other.db") as other:
        note_database(of_another, other)
    of_whom = shutil.copytree(trial_folder(0).parent, host.runs_dir / "tiny" / "checkpoints-12345678")
    (of_whom / "database").unlink()
    notes = [one.problem for one in examine(storage.url, host) if one.severity == "note"]
    for folder in (of_another, of_whom):
        assert f"{folder} (1.0 MiB) is of a study that this database does not have." in notes
    mends(storage, host, f"{orphan} (1.0 MiB) is of a study that this database does not have.")
    assert not orphan.exists()
    assert of_another.exists()
    assert of_whom.exists()
    assert trial_folder(0).exists()


# This host


def test_a_gpu_that_another_program_fills_is_told(storage: Storage, host: Host) -> None:
    gpus = [
        GpuMemory("idle", "A100", GIB, 80 * GIB),
        GpuMemory("ours", "A100", 70 * GIB, 80 * GIB),
        GpuMemory("theirs", "A100", 70 * GIB, 80 * GIB),
    ]
    with WorkerLease(storage, storage.load_study("tiny"), max_retries=0, device="ours") as worker:
        (one,) = found(storage, Host(host.runs_dir, gpus))
        assert one.problem.startswith("A100 (theirs): 70.0 GiB of 80.0 GiB are taken, and by no worker")
        change_worker(storage, worker, process_start="1")  # ours is dead
        assert len(found(storage, Host(host.runs_dir, gpus))) == 2


def test_the_memory_of_gpus_is_what_the_driver_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_memory() == ()
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho 'GPU-1a2b, NVIDIA A100-SXM4-80GB, 1024, 81920'\necho 'GPU-3c, GB10, [N/A], [N/A]'\n"
    )
    program.chmod(0o755)
    assert gpu_memory() == (GpuMemory("1a2b", "NVIDIA A100-SXM4-80GB", GIB, 80 * GIB),)
    program.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    assert gpu_memory() == ()


def test_data_that_this_host_lacks_or_has_otherwise_are_told(
    sqlite_url: str, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"id": str(number), "text": f"text {number}", "labels": {"size": number}} for number in range(40)]
    data = write_set(tmp_path / "data", {"tasks": {"size": {"kind": "regression"}}}, train=rows)
    config = tiny_study(tmp_path, data={"source": "jsonl", "path": str(data)})
    with open_storage(sqlite_url) as storage:
        storage.create_or_resume_study(config)
        storage.bind_data("tiny", load_data(config.data).fingerprint)
        assert found(storage, host, study="tiny") == []
        write_set(data, {"tasks": {"size": {"kind": "regression"}}}, train=rows[:-1])
        assert found(storage, host) == []  # the data are read of a study that is named
        (one,) = found(storage, host, study="tiny")
        assert "are others than it was made with" in one.problem
        data.rename(tmp_path / "moved")
        (one,) = found(storage, host)
        assert f"does not have its data, {data}" in one.problem
        (tmp_path / "mounted").mkdir()
        (tmp_path / "moved").rename(tmp_path / "mounted" / "data")
        monkeypatch.setenv("HPO_DATA_DIR", str(tmp_path / "mounted"))
        assert found(storage, host) == []


def test_a_study_that_cannot_go_on_here_is_told(sqlite_url: str, host: Host) -> None:
    precisions = {"fp_precision": {"type": "categorical", "choices": ["tf32", "fp8"]}}
    with open_storage(sqlite_url) as storage:
        opened = storage.create_or_resume_study(study(2, device="cpu", search_space=precisions))
        (one,) = found(storage, host)
        assert "2 of 2 trials are left, and no worker is in it. None of them can run here:" in one.problem
        with WorkerLease(storage, opened, max_retries=0):
            assert found(storage, host) == []
