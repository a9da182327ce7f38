import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from optuna.trial import TrialState, create_trial
from support.command_line import Finished, hpo_command, ok, refused
from support.worker_process import begin, result, study

from hpo.cluster.doctor.doctor import Finding, examine
from hpo.study.checkpoints.checkpoint_folders import note_database
from hpo.study.claims.leases import WorkerLease
from hpo.study.store.schema import claims
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study


@pytest.fixture
def storage(sqlite_url: str) -> Iterator[Storage]:
    with open_storage(sqlite_url) as opened:
        create_or_resume_study(opened, study(3))
        yield opened


@pytest.fixture
def host(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def found(storage: Storage, host: Path, **options: Any) -> list[Finding]:
    return list(examine(storage.url, host, **options))


def run_trial(worker: WorkerLease, outcome: str = "complete", **values: Any) -> int:
    lease, trial = begin(worker)
    worker.record_outcome(lease, result(outcome, **values))
    return int(trial.number)


def test_end_running_trials_without_claim(storage: Storage, host: Path) -> None:
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


@pytest.fixture
def trial_folder(storage: Storage, host: Path) -> Callable[[int], Path]:
    """Create folders of trials with a checkpoint of 1 MiB."""
    folder = host / "tiny" / f"checkpoints-{storage.study_token('tiny')[:8]}"
    note_database(folder, storage)

    def make(number: int) -> Path:
        weights = folder / f"trial-{number:05d}" / "best-00000001" / "model.safetensors"
        weights.parent.mkdir(parents=True)
        weights.write_bytes(b"x" * 2**20)
        return folder / f"trial-{number:05d}"

    return make


def test_remove_checkpoints_without_trial(
    storage: Storage, host: Path, trial_folder: Callable[[int], Path]
) -> None:
    with WorkerLease(storage, storage.load_study("tiny"), max_retries=0) as worker:
        complete = trial_folder(run_trial(worker))
        pruned = trial_folder(run_trial(worker, "pruned"))
        running, unknown = trial_folder(begin(worker)[1].number), trial_folder(7)
        of_user = [
            shutil.copytree(pruned, pruned.with_name(f"trial-{name}")) for name in ("00001.bak", "1", "old")
        ]
        of_user.append(pruned.with_name("trial-00009"))
        of_user[-1].touch()
        assert [one.problem for one in found(storage, host, fix=True)] == [
            f"{pruned} (1.0 MiB) is of trial 1, which is not one of the best.",
            f"{unknown} (1.0 MiB) is of trial 7, which is not of this study.",
        ]
        assert sorted(complete.parent.glob("trial-*")) == sorted([complete, running, *of_user])
        assert found(storage, host) == []


def test_remove_checkpoints_of_deleted_study(
    storage: Storage, host: Path, trial_folder: Callable[[int], Path], tmp_path: Path
) -> None:
    """Remove them only if the study was of this database."""
    with WorkerLease(storage, storage.load_study("tiny"), max_retries=0) as worker:
        kept = trial_folder(run_trial(worker))
    deleted = shutil.copytree(kept.parent, host / "gone" / "checkpoints-0badcafe")
    of_another = shutil.copytree(kept.parent, host / "tiny" / "checkpoints-deadbeef")
    with open_storage(f"sqlite:///{tmp_path}/other.db") as other:
        note_database(of_another, other)
    unknown = shutil.copytree(kept.parent, host / "tiny" / "checkpoints-12345678")
    (unknown / "database").unlink()
    [finding] = found(storage, host)
    assert finding.problem == f"{deleted} (1.0 MiB) is of a study that this database does not have."
    assert found(storage, host, fix=True)[0].mended
    assert found(storage, host) == []
    assert not deleted.exists()
    assert of_another.exists()
    assert unknown.exists()
    assert kept.exists()


@pytest.mark.parametrize(
    ("table", "column", "problem"),
    [
        ("hpo_studies", "definition", "its definition is damaged"),
        ("trial_user_attributes", "value_json", "its checkpoints were not examined"),
    ],
)
def test_checkpoints_of_damaged_study_stay(
    storage: Storage,
    host: Path,
    trial_folder: Callable[[int], Path],
    table: str,
    column: str,
    problem: str,
) -> None:
    with WorkerLease(storage, storage.load_study("tiny"), max_retries=0) as worker:
        kept = trial_folder(run_trial(worker))
    with storage.engine.begin() as connection:
        connection.execute(sa.text(f"UPDATE {table} SET {column} = '{{'"))
    [finding] = found(storage, host, fix=True)
    assert finding.problem == f"Study tiny: {problem}."
    assert not finding.mended
    assert kept.exists()


def test_doctor_command(tmp_path: Path) -> None:
    def run(*arguments: str) -> Finished:
        return hpo_command(tmp_path, "doctor", *arguments)

    (tmp_path / "runs").mkdir()
    with open_storage(f"sqlite:///{tmp_path}/runs/hpo.db") as storage:
        create_or_resume_study(storage, study(1)).add_trial(create_trial(state=TrialState.RUNNING))
    shown = ok(hpo_command(tmp_path, "status", "tiny", "--json")).json
    assert shown["foreign_trials"] == 1, "status agrees"
    first = run()
    assert first.exit_code == 1
    assert "warning (lost trials)" in first.out
    assert "1 to mend. `hpo doctor --fix` mends 1." in " ".join(first.out.split())
    as_json = run("tiny", "--json")
    assert as_json.exit_code == 1
    assert [one["check"] for one in as_json.json["findings"]] == ["lost trials"]
    assert as_json.json["ok"] is False
    mended = ok(run("tiny", "--fix"))
    assert "Mended. Ends it as FAIL" in mended.out
    assert "1 mended, nothing left to mend." in mended.out
    assert ok(run("--json")).json["ok"] is True
    refused(run("tiney"), "Did you mean `tiny`")
    assert run("--storage", "mysql://a:b@c/d").exit_code == 2
