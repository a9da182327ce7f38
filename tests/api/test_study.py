import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import yaml
from support import own_code_studies
from support.command_line import PYTHON_PATH, finish, hpo_command, ok, saved_steps, start_python
from support.own_loops import write_own
from support.tiny import write_study

import hpo
from hpo.errors import InputError, StorageError, StudyChangedError
from hpo.precision.table import apply_preset
from hpo.report.status import untried_message
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


def test_methods_and_commands_share_a_study(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = hpo.Study(write_study(folder, **GRID))
    with pytest.raises(StorageError):
        study.trials_dataframe()
    assert study.run().ended == "finished"
    assert "Study tiny (new): 0 of 3 trials ended" in capsys.readouterr().out
    assert study.run(n_trials=4).ended == "finished"
    listed = ok(hpo_command(folder, "best", "tiny.yaml", "--json")).json["trials"]
    (best,) = study.best()
    assert [best.number] == [trial["number"] for trial in listed]
    trials = study.trials_dataframe()
    assert sorted(trials["precision"]) == ["bf16", "bf16", "fp32", "fp32"]
    assert trials.loc[best.number, "objective.score"] == best.values[0]  # type: ignore[index]
    assert study.report() == Path("runs/tiny/report/report.html")


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


def test_a_mapping_is_a_study(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = yaml.safe_load(write_study(folder, n_trials=1).read_text())
    (folder / "tiny.yaml").unlink()
    url = f"sqlite:///{folder}/other.db"
    study = hpo.Study(content, storage=url, quiet=True)
    assert study.run().outcomes == {"complete": 1}
    assert capsys.readouterr().out == ""
    assert study.status()["trials"]["done"] == 1
    with pytest.raises(StudyChangedError):
        hpo.Study({**content, "search_space": {}}, storage=url, quiet=True).run()
    with pytest.raises(InputError, match=r"n_trials: must be >= 1.*\n.*Did you mean `search_space`"):
        hpo.Study({**content, "search_spac": {}, "n_trials": 0})


def test_an_interrupt_checkpoints_the_trial(folder: Path) -> None:
    """SIGINT, like a notebook's stop button."""
    write_study(folder, n_trials=1, training={"max_steps": 4000, "batch_size": 8, "max_length": 64})
    done = finish(start_python(folder, "-c", INTERRUPTED))
    assert "stopped ['RUNNING']" in done.out, done.err
    assert saved_steps(folder)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two finished trials of a study."""
    folder = tmp_path_factory.mktemp("searched")
    write_study(folder, n_trials=2, search_space=SPACE, sampler={"name": "grid"})
    ok(hpo_command(folder, "run", "tiny.yaml"))
    return folder


@pytest.fixture
def study(searched: Path, monkeypatch: pytest.MonkeyPatch) -> hpo.Study:
    """The finished study by its name; there is no studies/tiny.yaml."""
    monkeypatch.chdir(searched)
    monkeypatch.delenv("HPO_STORAGE", raising=False)
    return hpo.Study("tiny", quiet=True)


def test_the_best_model_is_evaluated_and_exported(
    study: hpo.Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    load_data = parts.load_data
    monkeypatch.setattr(parts, "load_data", lambda *of: reads.append(of) or load_data(*of))
    assert (study.use_best()[1], reads) == ({}, [])
    record, used = study.use_best(split="test", folder=tmp_path / "model")
    assert len(reads) == 1
    number = study.best()[0].number
    assert (used["evaluation"]["trial"], used["evaluation"]["split"]) == (number, "test")
    assert "test" in record.trials[number].detailed
    assert record.trials[number].detailed == study.record.trials[number].detailed
    assert hpo.load(used["export"], device="cpu").predict(["I sleep badly."])
    with pytest.raises(InputError, match="--batch must be 1 or 32, but got 7"):
        study.deploy(str(tmp_path / "deployed"), batch=7)
    assert not (tmp_path / "deployed").exists()


def test_train_check_and_verify_need_no_database(folder: Path) -> None:
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
    ("method", "options", "message"),
    [
        ("run", {"n_trials": 0}, "`n_trials` must be > 0, but got 0"),
        ("run", {"n_trials": "5"}, "`n_trials` must be > 0, but got 5"),
        ("run", {"n_trials": 2.5}, "`n_trials` must be a whole number <= 100000, but got 2.5"),
        ("run", {"n_trials": 100_001}, "`n_trials` must be a whole number <= 100000, but got 100001"),
        ("run", {"timeout": 0.0}, "`timeout` must be > 0"),
        ("run", {"workers": 2, "workers_per_device": 2}, "Give one of them"),
        ("run", {"until": "teatime"}, "teatime"),
        ("compare", {"question": "precison"}, "one of precisions, base_precision, .*, but got precison"),
        ("compare", {"top": 0}, "`top` must be > 0"),
        ("deploy", {"threads": -1}, "`threads` must be > 0"),
        ("plan", {"workers": -3}, "`workers` must be > 0"),
        ("verify", {"repeats": 0}, "`repeats` must be > 0"),
    ],
)
def test_methods_refuse_impossible_values(
    folder: Path, method: str, options: dict[str, Any], message: str
) -> None:
    study = hpo.Study(write_study(folder), quiet=True)
    with pytest.raises(InputError, match=message):
        getattr(study, method)(**options)


def test_a_study_uses_its_own_code_after_another_study_was_loaded(folder: Path) -> None:
    (folder / "own").mkdir()
    own = hpo.Study(own_code_studies.write(folder / "own"), quiet=True)
    assert hpo.Study(write_study(folder), quiet=True).check().study == "tiny"
    assert "times" in [task.name for task in own.check().facts.tasks]


def test_a_name_continues_the_stored_study_and_names_an_untried_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = str(write_own(tmp_path, name="kept", n_trials=1, search_space=SPACE))
    hpo.Study(path, quiet=True).init()
    command = [sys.executable, "-m", "hpo", "run", "kept"]
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    refused = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (refused.returncode, "--trust-code" in refused.stderr) == (2, True)
    ran = hpo.Study("kept", trust_code=str(tmp_path / "own.py"), quiet=True).run()
    assert ran.ended == "finished"
    tries = "hpo enqueue {0} --param fp_precision=bf16 && hpo worker {0}"
    message = "No trial shows bf16. To try it: "
    assert [*ran.text()][-1] == message + tries.format("kept") == ran.as_json()["untried"]
    again = hpo.Study(path, quiet=True).run()
    assert [*again.text()][-1] == message + tries.format(path)
    for precision in ("bf16", "fp32"):
        hpo.Study(path, quiet=True).enqueue({"fp_precision": precision})
    hpo.Study(path, quiet=True).run()  # the file has one trial
    after = hpo.Study("kept", quiet=True).record
    assert [trial.params["fp_precision"] for trial in after.trials] == ["fp32", "bf16", "fp32"]
    assert untried_message(after) == ""
