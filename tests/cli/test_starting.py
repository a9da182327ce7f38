from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from support.command_line import finish, hpo_command, ok, refused, start_hpo, stored

import hpo
from hpo.config import study_places
from hpo.study.reading.study_record import best_trials

pytestmark = pytest.mark.usefixtures("forgotten")


def test_what_it_prints_is_typed(tmp_path: Path) -> None:
    """Command after command as they stand there, in a process each."""
    said = ok(finish(start_hpo(tmp_path, "new", "my posts/first"))).out
    commands = [line.strip() for line in said.splitlines() if line.startswith("  ")]
    assert [line.split()[1] for line in commands[1:]] == ["check", "run", "best"]
    (change, name), *others = (shlex.split(line) for line in commands)
    assert change == "cd"
    folder = tmp_path / name
    for program, *words in others:
        assert program == "hpo"
        said = ok(finish(start_hpo(folder, *words))).out
        assert words[0] != "check" or said.endswith("No problem was found in these data.\n")
    record = stored(folder, "first")
    assert {trial.outcome for trial in record.trials} <= {"complete", "pruned"}, record.trials
    (best,) = best_trials(record)
    assert best.telemetry["metrics"]["mood"]["kappa"] > 0.2
    model = hpo.load(folder / "model", device="cpu", code=folder / "my_tasks.py")
    answer = model.predict(["The driver was rude again."])[0]["mood"]
    assert answer.label in ("angry", "pleased")


def test_studies_of_a_user_in_a_clone_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may lack the line with the question, or be no text."""
    monkeypatch.setattr(study_places, "INSTALLED", tmp_path)
    (tmp_path / "mine.yaml").write_text("name: mine\n")
    (tmp_path / "asked.yaml").write_bytes(b"# Question: which?\n\xff")
    listed = ok(hpo_command(tmp_path, "new", "--json")).json
    assert listed["examples"] == {"asked": "which?", "mine": ""}


@pytest.mark.parametrize("there", ["study.yaml", "my_tasks.py"])
def test_nothing_is_written_over(tmp_path: Path, there: str) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / there).write_text("mine")
    message = f"first/{there} must not be there yet; nothing was written"
    refused(hpo_command(tmp_path, "new", "first"), message)
    assert [path.name for path in (tmp_path / "first").iterdir()] == [there]
    assert (tmp_path / "first" / there).read_text() == "mine"


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("a study", "The name of the folder must be letters, digits"),
        ("file/inside", "file/inside: cannot be written: Not a directory"),
    ],
)
def test_an_impossible_folder_is_refused(tmp_path: Path, folder: str, message: str) -> None:
    (tmp_path / "file").touch()
    error = refused(hpo_command(tmp_path, "new", folder)).err
    assert " ".join(error.split()).count(message) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_in_the_folder_where_one_is(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    assert ok(hpo_command(tmp_path / "here", "new", ".", "--json")).json["study"] == "here"
