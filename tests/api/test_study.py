from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import yaml
from support import own_code_studies
from support.command_line import hpo_command, ok, saved_steps
from support.tiny import write_study

import hpo
from hpo.errors import InputError, StorageError, StudyChangedError
from hpo.precision.table import apply_preset
from hpo.study.sampling.promotion import promotion_of
from hpo.study.store.studies import create_or_resume_study
from hpo.trial import parts

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
    assert "Study tiny (new): 0 of 3 trials ended" in capsys.readouterr().out
    assert study.run(n_trials=4).ended == "finished"
    told = ok(hpo_command(folder, "best", "tiny.yaml", "--json")).json["trials"]
    (best,) = study.best()
    assert [best.number] == [trial["number"] for trial in told]
    trials = study.trials_dataframe()
    assert sorted(trials["precision"]) == ["bf16", "bf16", "fp32", "fp32"]
    assert trials.loc[best.number, "objective.score"] == best.values[0]  # type: ignore[index]
    assert study.report() == Path("runs/tiny/report/report.html")
    assert "trials='4 of 4 trials ended'" in repr(study)
    found = study.compare(top=1, max_seeds=3, precisions=("fp32", "bf16"))
    assert found == ok(hpo_command(folder, "compare", "tiny.yaml", "--json")).json


def test_a_run_prepares_its_study_once(folder: Path) -> None:
    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in prepares:
            calls[prepares[frame.f_code]] += 1

    prepares = {each.__code__: each.__name__ for each in (apply_preset, promotion_of, create_or_resume_study)}
    calls: Counter[str] = Counter()
    study = hpo.Study(write_study(folder, n_trials=2))
    sys.setprofile(count)
    try:
        assert study.run().outcomes == {"complete": 2}
    finally:
        sys.setprofile(None)
    assert calls == dict.fromkeys(prepares.values(), 1)


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


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which two trials of a study have run."""
    folder = tmp_path_factory.mktemp("searched")
    write_study(folder, n_trials=2, search_space=SPACE, sampler={"name": "grid"})
    ok(hpo_command(folder, "run", "tiny.yaml"))
    return folder


@pytest.fixture
def study(searched: Path, monkeypatch: pytest.MonkeyPatch) -> hpo.Study:
    monkeypatch.chdir(searched)
    monkeypatch.delenv("HPO_STORAGE", raising=False)
    return hpo.Study("tiny", quiet=True)


def test_what_is_only_in_the_database(study: hpo.Study, searched: Path) -> None:
    """There is no studies/tiny.yaml."""
    assert study.status() == ok(hpo_command(searched, "status", "tiny", "--json")).json
    assert study.config.n_trials == 2
    plan = study.plan(workers=4)
    assert (plan.num_workers, plan.whole_trials) == (4, 0.0), "nothing is left"
    assert {cost.measured_by for cost in plan.costs} <= {"1 complete trial", "2 complete trials"}
    with pytest.raises(InputError, match="tiny"):
        study.run()
    with pytest.raises(InputError, match="nonfinite"):
        study.diagnose(0)
    with pytest.raises(InputError, match="Trial 7: tiny has 2, numbered from 0"):
        study.diagnose(7)


def test_the_best_model_is_evaluated_and_exported(study: hpo.Study, tmp_path: Path) -> None:
    reads = []
    load_data = parts.load_data
    with mock.patch.object(parts, "load_data", lambda *of: reads.append(of) or load_data(*of)):
        record, used = study.use_best(split="test", folder=tmp_path / "model")
    assert len(reads) == 1
    number = study.best()[0].number
    assert (used["evaluation"]["trial"], used["evaluation"]["split"]) == (number, "test")
    assert "test" in record.trials[number].detailed
    assert record.trials[number].detailed == study.record.trials[number].detailed
    assert hpo.load(used["export"], device="cpu").predict(["I sleep badly."])
    assert study.report(str(tmp_path / "page")) == tmp_path / "page" / "report.html"
    assert study.export(tmp_path / "again") == tmp_path / "again"
    with pytest.raises(InputError, match="--batch must be 1 or 32, but got 7"):
        study.deploy(str(tmp_path / "deployed"), batch=7)
    assert not (tmp_path / "deployed").exists()


def test_what_needs_no_database(folder: Path) -> None:
    study = hpo.Study(write_study(folder), storage="postgresql://nobody@127.0.0.1:9/none", quiet=True)
    shown: list[Any] = []
    result = study.train({"learning_rate": 1e-3}, shown.append)
    assert result.outcome == "complete"
    assert [list(scored.values) for scored in shown][-1:] == [list(result.values or ())]
    assert study.check().study == "tiny"
    fp32, *_ = study.verify(repeats=1)
    assert (fp32.name, fp32.support.level) == ("fp32", "native")
    with pytest.raises(StorageError):
        study.init()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_trials": 0}, "`n_trials` must be > 0, but got 0"),
        ({"hours": -1.0}, "`hours` must be > 0"),
        ({"timeout": 0.0}, "`timeout` must be > 0"),
        ({"workers": 0}, "`workers` must be > 0"),
        ({"workers": 2, "workers_per_device": 2}, "Give one of them"),
        ({"until": "teatime"}, "teatime"),
    ],
)
def test_values_of_a_run_that_cannot_be(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        hpo.Study(write_study(folder), quiet=True).run(**options)
    assert not (folder / "runs" / "hpo.db").exists()


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("compare", {"question": "precison"}, "`question` must be one of precisions, .*, but got precison"),
        ("compare", {"top": 0}, "`top` must be > 0"),
        ("compare", {"until": "teatime"}, "teatime"),
        ("deploy", {"timeout": 0}, "`timeout` must be > 0"),
        ("deploy", {"threads": -1}, "`threads` must be > 0"),
        ("plan", {"workers": -3}, "`workers` must be > 0"),
        ("verify", {"repeats": 0}, "`repeats` must be > 0"),
    ],
)
def test_other_values_that_cannot_be(
    study: hpo.Study, method: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        getattr(study, method)(**options)


def test_two_studies_of_which_one_has_code_of_its_own(folder: Path) -> None:
    """Loading the other one takes the names of the first away."""
    (folder / "own").mkdir()
    own = hpo.Study(own_code_studies.write(folder / "own"), quiet=True)
    assert hpo.Study(write_study(folder), quiet=True).check().study == "tiny"
    assert "times" in [task.name for task in own.check().facts.tasks]


def test_a_stored_study_with_code_runs_where_it_is_trusted(folder: Path) -> None:
    hpo.Study(own_code_studies.write(folder), quiet=True).init()
    (folder / "tiny.yaml").unlink()
    python = "import hpo, sys\nprint(hpo.Study('tiny', trust_code=sys.argv[1:], quiet=True).check().study)"
    environment = {**os.environ, "PYTHONPATH": str(Path(hpo.__file__).parents[1])}
    for given, expected in (([], "trust_code="), (["own_kind.py"], "tiny")):
        command = [sys.executable, "-c", python, *given]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
        assert expected in done.stdout + done.stderr
        assert (done.returncode == 0) == bool(given)
