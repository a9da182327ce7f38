from __future__ import annotations

import ast
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import typer
from command_line import Finished, finish, hpo_command, ok, start_hpo
from readme import README
from study_records import fake_trial, record_of
from tiny import write_study
from typer.main import get_command

from hpo.cli import commands as cli
from hpo.cli.options import stop_signals
from hpo.errors import DataError
from hpo.precision.table import PRECISION_NAMES, Support
from hpo.report.status import study_status
from hpo.study.storage import open_storage
from hpo.study.study_record import StudyRecord, WorkerRecord
from hpo.trial.verify import PrecisionCheck

COMMANDS: dict[str, Any] = dict(get_command(cli.app).commands)  # type: ignore[attr-defined]
PRINTS_FOR_PEOPLE = sorted(COMMANDS)
ROOT = README.parent


def slow_modules_after(code: str, folder: Path = ROOT) -> set[str]:
    """Which of the modules that take long to import a new process in `folder` has after running `code`."""
    names = ("torch", "optuna", "transformers", "pandas", "sqlalchemy", "pydantic", "numpy", "sklearn")
    report = f"\nimport sys; print([name for name in {names} if name in sys.modules])"
    command = [sys.executable, "-c", code + report]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder, env=environment)
    return set(ast.literal_eval(done.stdout.splitlines()[-1]))


def test_help_imports_nothing_that_takes_long() -> None:
    assert slow_modules_after("import hpo.cli.commands") == set()
    assert "optuna" in slow_modules_after("import optuna"), "the check can fail"


@pytest.mark.parametrize(
    ("command", "first"),
    [("run", "hpo.study.run.run_study"), ("train", "hpo.trial.executor.Executor.run")],
)
def test_no_trial_waits_for_pandas(tmp_path: Path, command: str, first: str) -> None:
    write_study(tmp_path)
    code = (
        "import sys, hpo.cli.commands, hpo.study.run, hpo.trial.executor\n"
        f"def first(*_, **__): sys.exit('trials begin')\n{first} = first\n"
        f"sys.argv = ['hpo', '{command}', 'tiny.yaml']\n"
        "try: hpo.cli.commands.main()\nexcept SystemExit as end: assert str(end) == 'trials begin', end"
    )
    found = slow_modules_after(code, tmp_path)
    assert "transformers" in found
    assert "pandas" not in found


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"]])
def test_asking_for_help_imports_nothing_that_takes_long(arguments: list[str]) -> None:
    code = f"import sys, hpo.cli.commands\nsys.argv = ['hpo', *{arguments}]\n"
    found = slow_modules_after(f"{code}try: hpo.cli.commands.main()\nexcept SystemExit: pass")
    assert found <= {"pydantic"}, "with which typer itself reads the options of a command"


# What is documented


def test_help_lists_every_command(tmp_path: Path) -> None:
    text = ok(hpo_command(tmp_path, "--help")).out
    for name in COMMANDS:
        assert re.search(rf"^\W*{name} ", text, re.MULTILINE), name
    assert hpo_command(tmp_path).exit_code == 2


def test_help_says_where_the_default_database_is(tmp_path: Path) -> None:
    text = ok(hpo_command(tmp_path, "run", "--help", width=200)).out
    assert "[default: (sqlite:///runs/hpo.db, in the working folder)]" in text


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command_explains_it_and_its_options(tmp_path: Path, name: str) -> None:
    command = COMMANDS[name]
    text = ok(hpo_command(tmp_path, name, "--help", width=200)).out
    assert command.help.splitlines()[0] in text
    for parameter in command.params:
        assert parameter.help, parameter.name
        assert max(parameter.opts, key=len) in text or parameter.name == "study"


def test_readme_has_every_command() -> None:
    table = README.read_text().split("## Commands", 1)[1].split("\n## ", 1)[0]
    assert set(re.findall(r"^\| `hpo (\w+) STUDY`", table, re.MULTILINE)) == set(COMMANDS)
    for name, option in re.findall(r"`hpo (\w+) STUDY` \|.*?`(--[a-z-]+)", table):
        assert option in [given for parameter in COMMANDS[name].params for given in parameter.opts]


@pytest.mark.parametrize("name", PRINTS_FOR_PEOPLE)
def test_each_command_takes_json(name: str) -> None:
    assert "--json" in [option for parameter in COMMANDS[name].params for option in parameter.opts]


# What each prints, on one study


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the tiny study was run in fp32 to its end; not to be changed."""
    folder = tmp_path_factory.mktemp("ran")
    study = write_study(folder, checkpoint={"top_k": 1}, amp={"preset": "basic"})
    ok(hpo_command(folder, "run", str(study)))
    return folder


@pytest.fixture
def folder(ran: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(ran, tmp_path / "copy"))


def test_run_for_people(folder: Path) -> None:
    text = ok(hpo_command(folder, "run", "tiny.yaml", "--n-trials", "3")).out
    place = f"sqlite:///runs/hpo.db ({folder}/runs/hpo.db)"
    assert f"Study tiny (resumed): 2 of 3 trials done, in {place}." in text
    assert re.search(r"^trial   2  evaluation 1 of 1  score 0\.\d+  \d+\.\d s$", text, re.MULTILINE)
    assert re.search(r"^trial   2  complete +0\.\d+  learning_rate=\S+$", text, re.MULTILINE)
    assert "tiny: by requested precision" in text
    assert re.search(r"^best trial \d: score 0\.\d+$", text, re.MULTILINE)
    assert "requested fp32, effective fp32 (native), observed: 17 linear layers gave float32" in text
    assert "hpo best tiny --evaluate test" in text


def test_run_of_a_finished_study_runs_nothing(ran: Path) -> None:
    before = hpo_command(ran, "status", "tiny.yaml", "--json").json
    text = ok(hpo_command(ran, "run", "tiny.yaml")).out
    assert "Study tiny (finished): 2 of 2 trials done" in text
    assert "trial   " not in text
    assert "best trial" in text
    assert hpo_command(ran, "status", "tiny.yaml", "--json").json == before


def test_status(ran: Path) -> None:
    text = ok(hpo_command(ran, "status", "tiny.yaml")).out
    assert "tiny: 2 of 2 trials done, 0 running, 0 to come" in text
    assert re.search(r"complete +2", text)
    assert "In Optuna: 2 COMPLETE." in text
    assert "No live worker." in text
    assert re.search(r"Rate: [\d\u202f.]+ trials an hour", text)
    found = ok(hpo_command(ran, "status", "tiny.yaml", "--json")).json
    assert found["study"] == "tiny"
    assert found["n_trials"] == 2
    assert found["trials"] == {"open": 0, "running": 0, "done": 2}
    assert found["states"] == {"COMPLETE": 2}
    assert found["outcomes"] == {"complete": 2}
    (best,) = found["best"]
    assert best["values"].keys() == {"score"}
    assert best["params"].keys() == {"learning_rate"}
    assert found["workers"] == []
    assert found["trials_per_hour"] > 0
    assert found["estimated_end"] is None


def test_run_prints_the_status_as_json_and_nothing_else(ran: Path) -> None:
    finished = ok(hpo_command(ran, "run", "tiny.yaml", "--json"))
    status = hpo_command(ran, "status", "tiny.yaml", "--json").json
    assert finished.json == status | {"ended": "finished", "left_out": {}}
    assert finished.err == ""


def test_worker_of_a_finished_study_leaves(ran: Path) -> None:
    assert ok(hpo_command(ran, "worker", "tiny.yaml", "--json")).json == {
        "study": "tiny",
        "ended": "finished",
        "outcomes": {},
        "left_out": {},
    }
    assert "(finished): 2 of 2" in ok(hpo_command(ran, "worker", "tiny.yaml")).out


def test_init(tmp_path: Path) -> None:
    write_study(tmp_path)
    found = ok(hpo_command(tmp_path, "init", "tiny.yaml", "--n-trials", "5", "--json")).json
    assert found["trials"] == {"open": 5, "running": 0, "done": 0}
    text = ok(hpo_command(tmp_path, "init", "tiny.yaml")).out
    place = f"sqlite:///runs/hpo.db ({tmp_path}/runs/hpo.db)"
    assert text == f"The study tiny with 2 trials is ready in {place}.\n"
    assert "No complete trial yet." in ok(hpo_command(tmp_path, "status", "tiny")).out
    assert hpo_command(tmp_path, "best", "tiny").exit_code == 1
    assert ok(hpo_command(tmp_path, "report", "tiny")).out == "runs/tiny/report/report.html\n"


def test_best(ran: Path) -> None:
    status = hpo_command(ran, "status", "tiny.yaml", "--json").json
    found = ok(hpo_command(ran, "best", "tiny.yaml", "--json", "--evaluate", "validation")).json
    (best,) = found["trials"]
    assert {key: best[key] for key in ("number", "values", "params")} == status["best"][0]
    assert best["precision"]["observed"]["linear_dtypes"] == {"float32": 17}
    assert found["evaluation"]["split"] == "validation"
    assert found["evaluation"]["metrics"] == best["metrics"], "the checkpoint is the best evaluation's"
    text = ok(hpo_command(ran, "best", "tiny.yaml", "--evaluate", "test")).out
    assert re.search(r"Trial \d on test", text)
    assert re.search(r"criteria +f1_macro +0\.\d+", text)


def test_best_takes_the_study_from_the_database_where_its_file_is_gone(folder: Path) -> None:
    (folder / "tiny.yaml").unlink()
    found = ok(hpo_command(folder, "best", "tiny", "--json", "--evaluate", "test")).json
    assert found["evaluation"]["metrics"].keys() == {"criteria", "evidence", "severity", "burden"}


def test_best_refuses_a_file_that_has_changed_since(folder: Path) -> None:
    data = {"source": "synthetic", "synthetic": {"num_train": 9, "num_validation": 9, "num_test": 9}}
    write_study(folder, data=data)
    assert hpo_command(folder, "best", "tiny.yaml").exit_code == 0
    refused = hpo_command(folder, "best", "tiny.yaml", "--evaluate", "test")
    assert refused.exit_code == 2
    assert "~ data.synthetic.num_train: 48 -> 9" in refused.err


def test_best_exports_a_model(folder: Path) -> None:
    from transformers import AutoModel

    from hpo.models.export import load_exported

    (folder / "full").mkdir()
    (folder / "full" / "mine.txt").touch()
    refused = hpo_command(folder, "best", "tiny.yaml", "--export", "full")
    assert (refused.exit_code, "this one holds other files" in refused.err) == (2, True)
    assert hpo_command(folder, "best", "tiny.yaml", "--export", "full/mine.txt").exit_code == 2
    found = ok(hpo_command(folder, "best", "tiny.yaml", "--export", "model", "--json")).json
    assert found["export"] == "model"
    assert AutoModel.from_pretrained(folder / "model").config.hidden_size == 32
    assert load_exported(folder / "model")


def test_best_says_why_there_is_no_checkpoint(folder: Path) -> None:
    for path in (folder / "runs" / "tiny").glob("checkpoints-*"):
        shutil.rmtree(path)
    finished = hpo_command(folder, "best", "tiny.yaml", "--evaluate", "test")
    assert finished.exit_code == 1
    assert "checkpoint.top_k says how many trials keep theirs" in finished.err


def test_best_without_such_a_split(ran: Path) -> None:
    finished = hpo_command(ran, "best", "tiny.yaml", "--evaluate", "tset")
    assert (finished.exit_code, finished.out) == (2, ""), "nothing is printed as if all were well"
    assert "there is no split 'tset'. Did you mean `test`?" in finished.err
    names = "train, validation or test"
    assert names in ok(hpo_command(ran, "best", "--help", width=200)).out


def test_best_with_a_folder_that_cannot_be_made(ran: Path) -> None:
    for folder in ("/dev/null/x", "/dev/null/x/y"):
        finished = hpo_command(ran, "best", "tiny.yaml", "--export", folder)
        assert (finished.exit_code, finished.out) == (2, "")
        assert (
            finished.err
            == f"Error: {folder}: an export needs a folder that may be made, but /dev/null is none.\n"
        )


def test_report(folder: Path) -> None:
    found = ok(hpo_command(folder, "report", "tiny.yaml", "--json")).json
    assert found == {"study": "tiny", "report": "runs/tiny/report/report.html"}
    assert "<html" in (folder / found["report"]).read_text()
    assert ok(hpo_command(folder, "report", "tiny.yaml", "--out", "there")).out == "there/report.html\n"
    assert hpo_command(folder, "report", "tiny.yaml", "--out", "tiny.yaml").exit_code == 2


def test_dashboard_prints_its_address_and_ends_on_ctrl_c(folder: Path) -> None:
    process = start_hpo(folder, "dashboard", "tiny.yaml", "--port", "0", PYTHONUNBUFFERED="1")
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.fullmatch(r"(http://127\.0\.0\.1:\d+)/dashboard/studies/1 \(Ctrl-C ends it\)\n", line)
    assert found, line or finish(process)
    with urllib.request.urlopen(f"{found[1]}/api/studies/1") as answer:
        assert json.load(answer)["name"] == "tiny"
    port = found[1].rpartition(":")[2]
    busy = hpo_command(folder, "dashboard", "tiny.yaml", "--port", port)
    assert (busy.exit_code, "Address already in use. Choose another --port" in busy.err) == (2, True)
    process.send_signal(signal.SIGINT)
    assert finish(process) == Finished(0, "", "")


# hpo train


def test_train_prints_the_record_that_a_study_stores(ran: Path, tmp_path: Path) -> None:
    write_study(tmp_path)
    record = ok(hpo_command(tmp_path, "train", "tiny.yaml", "-p", "learning_rate=2e-4", "--json")).json
    with open_storage(f"sqlite:///{ran}/runs/hpo.db") as storage:
        stored = storage.load_study("tiny").trials[0]
    assert record.keys() == {"params", "values", *stored.user_attrs}
    assert record["params"] == {"learning_rate": 2e-4}
    assert record["values"].keys() == {"score"}
    assert record["telemetry"].keys() == stored.user_attrs["telemetry"].keys()
    assert record["outcome"] == "complete"
    assert not any((tmp_path / "runs" / "tiny").iterdir()), "it keeps no checkpoint"
    assert not (tmp_path / "runs" / "hpo.db").exists()


def test_train_for_people(tmp_path: Path) -> None:
    write_study(tmp_path)
    text = ok(hpo_command(tmp_path, "train", "tiny.yaml", "--param", "fp_precision=bf16")).out
    assert re.search(r"^step 4  100%  \d+\.\d s  loss [\d.]+  score 0\.\d+$", text, re.MULTILINE)
    assert "\ncomplete\n" in text
    assert "fp_precision_effective: bf16" in text
    assert re.search(r"^peak_memory_bytes: [\d.]+ [MG]iB$", text, re.MULTILINE)


def test_train_that_does_not_complete_ends_with_1(tmp_path: Path) -> None:
    write_study(tmp_path)
    finished = hpo_command(tmp_path, "train", "tiny.yaml", "-p", "fp_precision=tf32")
    assert finished.exit_code == 1
    assert re.match(r"unsupported: `tf32` needs CUDA", finished.out)
    assert "Best evaluation" not in finished.out


def test_train_shows_the_traceback_of_a_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_study(tmp_path)
    monkeypatch.setattr("hpo.trial.executor.build_optimizer", lambda *_, **__: 1 / 0)
    finished = hpo_command(tmp_path, "train", "tiny.yaml")
    assert finished.exit_code == 1
    assert "failed: ZeroDivisionError: division by zero" in finished.out
    assert "Traceback (most recent call last)" in finished.err


def test_an_error_that_nobody_meant_to_raise_is_not_swallowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_study(tmp_path)

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("hpo.config.study_config.load_study", broken)
    for command in ("run", "train", "verify"):
        with pytest.raises(ZeroDivisionError):
            hpo_command(tmp_path, command, "tiny.yaml")


# hpo verify


def test_verify(tmp_path: Path) -> None:
    write_study(tmp_path)
    finished = ok(hpo_command(tmp_path, "verify", "tiny.yaml", "--repeats", "1", "--json"))
    found = finished.json
    assert found.keys() == {"device", "precisions", "recommendation"}
    assert [row["name"] for row in found["precisions"]] == list(PRECISION_NAMES)
    bf16 = found["precisions"][PRECISION_NAMES.index("bf16")]
    assert bf16["compatibility"]["verdict"] == "ok"
    assert 0 < max(bf16["compatibility"]["measurement"]["logits_relative_error"].values()) < 0.1
    measurement = bf16["compatibility"]["measurement"]
    assert 0 < measurement["speed_ratio_low"] <= measurement["speed_ratio"] <= measurement["speed_ratio_high"]
    assert (
        "checking bf16 ... (emulated here, so slow)" in finished.err
        or "checking bf16 ... one" in finished.err
    )
    assert "timing fp32 and bf16 in turn, 1 times" in finished.err


def test_verify_for_people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_study(tmp_path)
    check = PrecisionCheck("fp32", Support("native"), None, "a note on it")
    monkeypatch.setattr("hpo.trial.verify.verify", lambda *_, **__: [check])
    text = ok(hpo_command(tmp_path, "verify", "tiny.yaml")).out
    assert re.search(r"^ *fp32 +native", text, re.MULTILINE)
    assert re.search(r"^fp32 +a note on it", text, re.MULTILINE)
    assert "No precision works natively with this model here" in text


# Options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run",), "Missing argument 'STUDY'"),
        (("nonsense",), "No such command 'nonsense'"),
        (("run", "tiny.yaml", "--nonsense"), "No such option: --nonsense"),
        (("run", "tiny.yaml", "--timeout", "nan"), "must be a number of seconds > 0, but got nan"),
        (("run", "tiny.yaml", "--timeout", "0"), "must be a number of seconds > 0, but got 0"),
        (("run", "tiny.yaml", "--timeout", "inf"), "must be a number of seconds > 0, but got inf"),
        (("worker", "tiny.yaml", "--timeout", "-1"), "must be a number of seconds > 0, but got -1"),
        (("run", "tiny.yaml", "--n-trials", "0"), "'--n-trials'"),
        (("run", "tiny.yaml", "--n-trials", "1e9"), "'--n-trials'"),
        (("run", "tiny.yaml", "--n-trials", "999999999"), "'--n-trials'"),
        (("run", "tiny.yaml", "--workers", "0"), "'--workers'"),
        (("run", "tiny.yaml", "--workers-per-device", "0"), "'--workers-per-device'"),
        (
            ("run", "tiny.yaml", "--workers", "4", "--workers-per-device", "2"),
            "Error: --workers 4 counts all processes of this machine and --workers-per-device 2 those of",
        ),
        (("train", "tiny.yaml", "-p", "lr=1e-4"), "Did you mean `learning_rate`?"),
        (("train", "tiny.yaml", "-p", "wd=0.1"), "Did you mean `weight_decay`?"),
        (("train", "tiny.yaml", "-p", "bs=8"), "Did you mean `batch_size`?"),
        (("verify", "tiny.yaml", "--repeats", "0"), "'--repeats'"),
        (("dashboard", "tiny.yaml", "--port", "99999"), "'--port'"),
        (("train", "tiny.yaml", "-p", "learning_rate"), "must be written as name=value"),
        (("train", "tiny.yaml", "-p", "learning_rat=1"), "Did you mean `learning_rate`?"),
        (("train", "tiny.yaml", "-p", "learning_rate=nan"), "must be a number, but got `nan`"),
        (("train", "tiny.yaml", "-p", "max_seconds=nan"), "must be a number, but got `nan`"),
        (("train", "tiny.yaml", "-p", "epochs=-1"), "must be > 0, but got `-1`"),
        (("train", "tiny.yaml", "-p", "fp_precision=bf17"), "Did you mean `bf16`?"),
        (("train", "tiny.yaml", "-p", "epochs=1", "-p", "max_steps=2"), "a trial has one budget"),
    ],
)
def test_nonsense_options(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    write_study(tmp_path)
    finished = hpo_command(tmp_path, *arguments, width=200)
    assert finished.exit_code == 2
    assert message in finished.err
    assert not (tmp_path / "runs").exists()


# Where the study is


def test_study_by_name_or_by_path(tmp_path: Path) -> None:
    (tmp_path / "studies").mkdir()
    write_study(tmp_path / "studies").rename(tmp_path / "studies" / "mine.yaml")
    ok(hpo_command(tmp_path, "init", "mine"))
    for study in ("mine", "studies/mine.yaml", str(tmp_path / "studies" / "mine.yaml"), "tiny"):
        assert ok(hpo_command(tmp_path, "status", study, "--json")).json["study"] == "tiny"
    unknown = hpo_command(tmp_path, "run", "mien")
    assert unknown.exit_code == 2
    assert "there is no study `mien`" in unknown.err
    assert "Did you mean `mine`?" in unknown.err
    unknown = hpo_command(tmp_path, "status", "tinny")
    assert unknown.exit_code == 2
    assert "There is no study `tinny` in sqlite:///runs/hpo.db. Did you mean `tiny`?" in unknown.err


@pytest.mark.parametrize("command", ["status", "best", "report", "dashboard"])
def test_commands_that_read_make_nothing(tmp_path: Path, command: str) -> None:
    write_study(tmp_path)
    finished = hpo_command(tmp_path, command, "tiny.yaml")
    assert finished.exit_code == 2
    place = f"sqlite:///runs/hpo.db ({tmp_path}/runs/hpo.db)"
    assert f"There is no study database at {place}. `hpo run STUDY` makes one." in finished.err
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.yaml"}


@pytest.mark.parametrize("command", ["run", "worker", "init", "train", "verify"])
def test_working_folder_that_cannot_be_written(tmp_path: Path, command: str) -> None:
    write_study(tmp_path)
    (tmp_path / "runs").write_text("no folder")
    finished = hpo_command(tmp_path, command, "tiny.yaml")
    assert finished.exit_code == 2
    assert re.search(r"must be a folder that may be written, but: \w.*\. Run hpo in another", finished.err)
    assert (tmp_path / "runs").read_text() == "no folder"


# Numbers of a study


def live_worker(trial_number: int | None) -> WorkerRecord:
    now = datetime.now(UTC)
    return WorkerRecord("node1-7-abc", "node1", 7, now, now, alive=True, trial_number=trial_number)


def at(number: int, begin: float, end: float) -> Any:
    """A complete trial of those minutes."""
    from dataclasses import replace

    start = datetime(2026, 1, 1, tzinfo=UTC)
    times = (start + timedelta(minutes=begin), start + timedelta(minutes=end))
    return replace(fake_trial(number, "fp32"), started=times[0], ended=times[1], seconds=60 * (end - begin))


def record(*trials: Any, **changes: Any) -> StudyRecord:
    slots = {"open": 2, "running": 1, "done": len(trials)}
    return record_of(list(trials), slots=slots, workers=[live_worker(3)], **changes)


def test_rate_counts_the_time_in_which_the_study_was_worked_on() -> None:
    # Two at once, then a night, then one: 10 + 5 minutes.
    status = study_status(record(at(0, 0, 8), at(1, 2, 10), at(2, 600, 605)))
    assert status["trials_per_hour"] == pytest.approx(12)
    end = datetime.fromisoformat(status["estimated_end"])
    assert end - datetime.now(UTC) == pytest.approx(timedelta(minutes=15), abs=timedelta(seconds=30))
    assert status["workers"][0]["trial"] == 3


def test_no_estimate_without_a_live_worker_or_an_ended_trial() -> None:
    assert (
        study_status(record_of([at(0, 0, 8)], slots={"open": 1, "running": 0, "done": 1}))["estimated_end"]
        is None
    )
    status = study_status(record())
    assert (status["trials_per_hour"], status["estimated_end"], status["best"]) == (None, None, [])


def test_rate_counts_what_trained() -> None:
    """Trials that fail at once do not make a study fast."""
    from dataclasses import replace

    failed = [
        replace(at(number, 0, 0.001), outcome="failed", values=None, evaluations=[]) for number in range(2, 9)
    ]
    status = study_status(record(at(0, 0, 10), at(1, 10, 20), *failed))
    assert status["trials_per_hour"] == pytest.approx(6)
    assert study_status(record(*failed))["trials_per_hour"] is None


# Progress and signals


@pytest.mark.parametrize("command", ["run", "train"])
def test_what_takes_long_is_told_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def slow(*_: object, **__: object) -> None:
        logging.getLogger("hpo.data").info("tokenising %s texts", 20_000)
        raise DataError("and then it ends")

    write_study(tmp_path)
    monkeypatch.setattr("hpo.trial.executor.load_data", slow)
    finished = hpo_command(tmp_path, command, "tiny.yaml")
    assert finished.err == "tokenising 20000 texts\nError: and then it ends\n"
    assert hpo_command(tmp_path, command, "tiny.yaml", "--json").err == "Error: and then it ends\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once_and_says_so(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    def twice() -> None:
        with stop_signals() as stop:
            signal.raise_signal(number)
            assert stop.is_set()
            signal.raise_signal(number)

    before = signal.getsignal(number)
    with pytest.raises(typer.Exit) as end:
        twice()
    assert end.value.exit_code == 130
    assert "goes on from the last checkpoint" in capsys.readouterr().err
    assert signal.getsignal(number) is before
