import shlex
from pathlib import Path

import pytest
from support.command_line import finish, hpo_command, ok, refused, start_hpo, stored

import hpo
from hpo.study.reading.study_record import best_trials

pytestmark = pytest.mark.usefixtures("forgotten")


def test_the_printed_commands_work(tmp_path: Path) -> None:
    """Each in a new process."""
    printed = ok(finish(start_hpo(tmp_path, "new", "my posts/first"))).out
    commands = [line.strip() for line in printed.splitlines() if line.startswith("  ")]
    assert [line.split()[1] for line in commands[1:]] == ["check", "run", "best"]
    (change, name), *others = (shlex.split(line) for line in commands)
    assert change == "cd"
    folder = tmp_path / name
    for program, *words in others:
        assert program == "hpo"
        ok(finish(start_hpo(folder, *words)))
    record = stored(folder, "first")
    assert {trial.outcome for trial in record.trials} <= {"complete", "pruned"}, record.trials
    (best,) = best_trials(record)
    assert best.telemetry["metrics"]["mood"]["kappa"] > 0.2
    model = hpo.load(folder / "model", device="cpu", code=folder / "my_tasks.py")
    assert model.predict(["The driver was rude again."])[0]["mood"].label in ("angry", "pleased")


def test_an_existing_file_is_kept(tmp_path: Path) -> None:
    own = tmp_path / "first" / "my_tasks.py"
    own.parent.mkdir()
    own.write_text("mine")
    refused(hpo_command(tmp_path, "new", "first"), "first/my_tasks.py must not exist yet; nothing was writt")
    assert [*own.parent.iterdir()] == [own]
    assert own.read_text() == "mine"
