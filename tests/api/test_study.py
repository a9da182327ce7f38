"""`hpo.Study`: what the commands do, from Python and in a notebook."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import hpo_command, ok, saved_steps
from tiny import write_study

import hpo
from hpo.errors import InputError, StorageError, StudyChangedError

SPACE = {
    "fp_precision": {"type": "categorical", "choices": ["fp32", "bf16"]},
    "learning_rate": {"type": "categorical", "choices": [1e-4, 1e-3]},
}
GRID: dict[str, Any] = {"n_trials": 3, "sampler": {"name": "grid"}, "search_space": SPACE}


INTERRUPTED = """
import os, signal, threading, time
from pathlib import Path
import hpo

def interrupt():
    while not list(Path("runs").rglob("trial-00000")):
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
study = hpo.Study("tiny.yaml")
print(study.run().ended, [trial.state for trial in study.record.trials])
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HPO_STORAGE", raising=False)
    return tmp_path


def test_it_is_the_study_of_the_commands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = hpo.Study(write_study(folder, **GRID))
    with pytest.raises(StorageError):
        study.trials_dataframe()
    assert study.run().ended == "finished"
    assert "Study tiny (new): 0 of 3 trials done" in capsys.readouterr().out
    assert study.run(n_trials=4).ended == "finished"
    told = ok(hpo_command(folder, "best", "tiny.yaml", "--json")).json["trials"]
    (best,) = study.best()
    assert [best.number] == [trial["number"] for trial in told]
    trials = study.trials_dataframe()
    assert sorted(trials["precision"]) == ["bf16", "bf16", "fp32", "fp32"]
    assert trials.loc[best.number, "objective.score"] == best.values[0]  # type: ignore[index]
    assert study.report() == Path("runs/tiny/report/report.html")
    shown = study._repr_html_()
    assert "<b>tiny</b>: 4 of 4 trials done" in shown
    assert len(re.findall("<circle ", shown)) == 4
    assert re.findall("(?:src|href)=|https?://(?!www.w3.org/2000/svg)", shown) == [], "it is read offline"
    found = study.compare(top=1, max_seeds=3, precisions=("fp32", "bf16"))
    assert found == ok(hpo_command(folder, "compare", "tiny.yaml", "--json")).json


def test_a_mapping_is_a_study_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = yaml.safe_load(write_study(folder, n_trials=1).read_text())
    (folder / "tiny.yaml").unlink()
    url = f"sqlite:///{folder}/other.db"
    study = hpo.Study(content, storage=url, quiet=True)
    assert study.run().outcomes == {"complete": 1}
    assert capsys.readouterr().out == ""
    assert ok(hpo_command(folder, "status", "tiny", "--storage", url, "--json")).json["trials"]["done"] == 1
    changed = {**content, "search_space": {}}
    with pytest.raises(StudyChangedError):
        hpo.Study(changed, storage=url, quiet=True).run()


def test_what_is_wrong_with_it_is_said_at_once(folder: Path) -> None:
    content = yaml.safe_load(write_study(folder).read_text())
    training = {**content["training"], "learning_rat": 1}
    with pytest.raises(InputError, match=r"n_trials: must be >= 1.*\n.*Did you mean `learning_rate`"):
        hpo.Study({**content, "training": training, "n_trials": 0})
    with pytest.raises(InputError, match="nowhere"):
        hpo.Study("nowhere.yaml")


def test_an_interrupt_checkpoints_the_trial(folder: Path) -> None:
    """As a notebook's stop button does: SIGINT."""
    write_study(folder, n_trials=1, training={"max_steps": 4000, "batch_size": 8, "max_length": 64})
    environment = {**os.environ, "PYTHONPATH": str(Path(hpo.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, env=environment, cwd=folder
    )
    assert "stopped ['RUNNING']" in done.stdout, done.stderr
    assert saved_steps(folder)
