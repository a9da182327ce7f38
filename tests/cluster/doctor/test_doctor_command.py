from __future__ import annotations

from pathlib import Path

from optuna.trial import TrialState, create_trial
from support.command_line import Finished, hpo_command, ok, refused
from support.tiny import tiny_study, write_study
from support.worker_process import study

from hpo.study.store.storage import open_storage
from hpo.study.store.studies import create_or_resume_study


def run(folder: Path, *arguments: str) -> Finished:
    return hpo_command(folder, "doctor", *arguments)


def test_the_command_mends_and_says_by_its_exit_code_what_is_left(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/runs/hpo.db"
    (tmp_path / "runs").mkdir()
    path = write_study(tmp_path, n_trials=1)
    with open_storage(url) as storage:
        opened = create_or_resume_study(storage, tiny_study(tmp_path, n_trials=1))
        opened.add_trial(create_trial(state=TrialState.RUNNING))
    first = run(tmp_path)
    assert first.exit_code == 1
    assert "warning (lost trials)" in first.out
    assert "1 to mend. `hpo doctor --fix` mends 1." in " ".join(first.out.split())
    as_json = run(tmp_path, "tiny", "--json")
    assert as_json.exit_code == 1
    assert [one["check"] for one in as_json.json["findings"]] == ["lost trials"]
    assert as_json.json["ok"] is False
    mended = run(tmp_path, str(path), "--fix")
    assert mended.exit_code == 0
    assert "Mended. Ends it as FAIL" in mended.out
    assert "1 mended, nothing left to mend." in mended.out
    again = run(tmp_path, "--json")
    assert again.exit_code == 0
    assert again.json["ok"] is True


def test_an_unknown_study_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with open_storage(f"sqlite:///{tmp_path}/runs/hpo.db") as storage:
        create_or_resume_study(storage, study(1))
    refused(run(tmp_path, "tiney"), "Did you mean `tiny`")
    assert run(tmp_path, "--storage", "mysql://a:b@c/d").exit_code == 2


def test_status_and_doctor_agree_about_a_trial_without_a_claim(tmp_path: Path) -> None:
    """Plain Optuna has made it, and no worker takes it."""
    write_study(tmp_path)
    ok(hpo_command(tmp_path, "init", "tiny.yaml"))
    problem = "trial 0 is RUNNING, but no worker of the study made it."
    with open_storage(f"sqlite:///{tmp_path}/runs/hpo.db") as storage:
        storage.load_study("tiny").add_trial(create_trial(state=TrialState.RUNNING))
    [finding] = hpo_command(tmp_path, "doctor", "--json").json["findings"]
    assert finding["problem"] == f"Study tiny: {problem}"
    assert ok(hpo_command(tmp_path, "status", "tiny", "--json")).json["foreign_trials"] == 1
    shown = " ".join(ok(hpo_command(tmp_path, "status", "tiny")).out.split())
    assert "Trials of other programs, which do not count: 1." in shown
    assert "The next worker" not in shown
    assert hpo_command(tmp_path, "doctor", "--fix").exit_code == 0
