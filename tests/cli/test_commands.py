from __future__ import annotations

import ast
import inspect
import json
import logging
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import typer
from support.command_line import COMMANDS, ROOT, Finished, finish, hpo_command, ok, refused, start_hpo
from support.tiny import write_study

import hpo
from hpo.cli.commands import PANELS
from hpo.cli.options import ended_at_once
from hpo.errors import DataError
from hpo.precision.table import PRECISION_NAMES
from hpo.study.running.stopping import stop_on_signals
from hpo.study.store.storage import open_storage


def slow_modules_after(code: str) -> set[str]:
    """Which of the modules that take long to import a new process has after running `code`."""
    names = ("torch", "optuna", "transformers", "pandas", "sqlalchemy", "pydantic", "numpy", "sklearn")
    names += ("alembic", "scipy", "plotly", "jinja2")
    report = f"\nimport sys; print([name for name in {names} if name in sys.modules])"
    command = [sys.executable, "-c", code + report]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment)
    return set(ast.literal_eval(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"]])
def test_help_imports_no_slow_module(arguments: list[str]) -> None:
    code = f"import sys, hpo.cli.commands\nsys.argv = ['hpo', *{arguments}]\n"
    found = slow_modules_after(f"{code}try: hpo.cli.commands.main()\nexcept SystemExit: pass")
    assert found <= {"pydantic"}, "with which typer itself reads the options of a command"


def test_status_imports_no_pytorch(folder: Path) -> None:
    database = folder / "runs" / "hpo.db"
    arguments = ["hpo", "status", "tiny", "--storage", f"sqlite:///{database}"]
    found = slow_modules_after(
        f"import sys, hpo.cli.commands\nsys.argv = {arguments}\nhpo.cli.commands.app(standalone_mode=False)"
    )
    assert not found & {"torch", "transformers", "pandas", "sklearn", "plotly"}


# What each says of itself


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_is_explained_with_its_options_and_takes_json(name: str) -> None:
    command = COMMANDS[name]
    assert command.help
    assert all(parameter.help for parameter in command.params)
    assert "--json" in [option for parameter in command.params for option in parameter.opts]


@pytest.mark.parametrize("name", [name for names in PANELS.values() for name in names.split()])
def test_help_lists_each_command_once_in_its_panel(name: str, tmp_path: Path) -> None:
    panels = re.split(r"^╭─ (\w+) ─+╮$", ok(hpo_command(tmp_path, "--help")).out, flags=re.MULTILINE)
    shown = dict(zip(panels[1::2], panels[2::2], strict=True))
    has_it = [panel for panel, text in shown.items() if re.search(rf"^│ {name} ", text, re.MULTILINE)]
    assert has_it == [panel for panel, names in PANELS.items() if name in names.split()]
    assert len(has_it) == 1


def test_each_command_has_a_panel() -> None:
    listed = [name for names in PANELS.values() for name in names.split()]
    assert sorted(listed) == sorted({name.split()[0] for name in COMMANDS})


MOST_STATEMENTS = 10
OF_NO_STUDY = {"new", "predict", "studies", "doctor", "submit", *(n for n in COMMANDS if " " in n)}
"""Commands that concern no study, several studies, or a batch system."""


def functions_of_commands() -> dict[str, ast.FunctionDef]:
    files = (ROOT / "hpo" / "cli").glob("*.py")
    trees = [ast.parse(file.read_text()) for file in files]
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    decorated = {node: "".join(map(ast.unparse, node.decorator_list)) for node in functions}
    return {node.name: node for node, by in decorated.items() if "command(" in by and "group=" not in by}


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - OF_NO_STUDY))
def test_a_command_about_a_study_is_a_thin_call_of_a_method(name: str) -> None:
    function = functions_of_commands()[name]
    statements = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.stmt) and not isinstance(node, ast.ImportFrom | ast.FunctionDef)
    ]
    assert len(statements) - 1 <= MOST_STATEMENTS, "besides the docstring"
    used = {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
    public = {method for method in dir(hpo.Study) if not method.startswith("_")}
    assert used & (public - {"name", "config", "file"})


# What each prints, on one study


def test_run_for_people(folder: Path) -> None:
    text = ok(hpo_command(folder, "run", "tiny.yaml", "--n-trials", "3")).out
    place = f"sqlite:///runs/hpo.db ({folder}/runs/hpo.db)"
    assert f"Study tiny (resumed): 2 of 3 trials ended, in {place}." in text
    assert re.search(
        r"^trial   2  complete +score 0\.\d+  learning_rate=\S+  3/3 trials(  best score so far)?$",
        text,
        re.MULTILINE,
    )
    assert "tiny: by requested precision" in text
    assert re.search(r"^best trial \d: score 0\.\d+ \(best constant prediction 0\.\d+\)$", text, re.MULTILINE)
    assert "requested fp32, ran fp32 (native), observed: 17 weights multiplied in float32" in text
    assert "   hpo best tiny\n" in text


def test_run_of_a_finished_study_runs_nothing(ran: Path) -> None:
    """It prints the status, with --json and nothing else."""
    status = hpo_command(ran, "status", "tiny.yaml", "--json").json
    finished = ok(hpo_command(ran, "run", "tiny.yaml", "--json"))
    assert finished.json == status | {"ended": "finished", "left_out": {}}
    assert finished.err == ""
    text = ok(hpo_command(ran, "run", "tiny.yaml")).out
    assert "Study tiny (finished): 2 of 2 trials ended" in text
    assert "trial   " not in text
    assert "best trial" in text
    assert hpo_command(ran, "status", "tiny.yaml", "--json").json == status


def test_init(tmp_path: Path) -> None:
    write_study(tmp_path)
    found = ok(hpo_command(tmp_path, "init", "tiny.yaml", "--n-trials", "5", "--json")).json
    assert found["trials"] == {"open": 5, "running": 0, "done": 0}
    text = ok(hpo_command(tmp_path, "init", "tiny.yaml")).out
    place = f"sqlite:///runs/hpo.db ({tmp_path}/runs/hpo.db)"
    assert text == f"The study tiny with 2 trials is ready in {place}.\n"
    assert "0 trials, none complete." in ok(hpo_command(tmp_path, "status", "tiny")).out
    assert hpo_command(tmp_path, "best", "tiny").exit_code == 1
    assert ok(hpo_command(tmp_path, "report", "tiny")).out == "runs/tiny/report/report.html\n"


def test_report(folder: Path) -> None:
    found = ok(hpo_command(folder, "report", "tiny.yaml", "--json")).json
    assert found == {"study": "tiny", "report": "runs/tiny/report/report.html"}
    assert "<html" in (folder / found["report"]).read_text()
    assert ok(hpo_command(folder, "report", "tiny.yaml", "--out", "there")).out == "there/report.html\n"
    assert hpo_command(folder, "report", "tiny.yaml", "--out", "tiny.yaml").exit_code == 2


def test_dashboard_prints_its_address_and_ends_on_ctrl_c(folder: Path) -> None:
    assert inspect.signature(hpo.Study.dashboard).parameters["host"].default == "127.0.0.1"
    options = ("--port", "0", "--host", "127.0.0.2")
    process = start_hpo(folder, "dashboard", "tiny.yaml", *options, PYTHONUNBUFFERED="1")
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.fullmatch(r"http://(127\.0\.0\.2:\d+)/dashboard/studies/1 \(Ctrl-C ends it\)\n", line)
    assert found, line or finish(process)
    with urllib.request.urlopen(f"http://{found[1]}/api/studies/1") as answer:
        assert json.load(answer)["name"] == "tiny"
    process.send_signal(signal.SIGINT)
    assert finish(process) == Finished(0, "", f"Warning: whoever reaches {found[1]} can delete studies.\n")


# hpo train


def test_train_prints_the_same_record_as_a_study_stores(ran: Path, tmp_path: Path) -> None:
    write_study(tmp_path)
    record = ok(hpo_command(tmp_path, "train", "tiny.yaml", "-p", "learning_rate=2e-4", "--json")).json
    with open_storage(f"sqlite:///{ran}/runs/hpo.db") as storage:
        stored = storage.load_study("tiny").trials[0]
    of_a_worker = {"worker", "active_seconds"}
    assert record.keys() == {"params", "values", *stored.user_attrs} - of_a_worker
    assert record["params"] == {"learning_rate": 2e-4}
    assert record["values"].keys() == {"score"}
    assert record["telemetry"].keys() == stored.user_attrs["telemetry"].keys()
    assert record["outcome"] == "complete"
    assert not any((tmp_path / "runs" / "tiny").iterdir()), "it keeps no checkpoint"
    assert not (tmp_path / "runs" / "hpo.db").exists()


def test_train_for_people(tmp_path: Path) -> None:
    write_study(tmp_path)
    text = ok(hpo_command(tmp_path, "train", "tiny.yaml", "--param", "fp_precision=bf16")).out
    assert re.search(r"^step 4  100%  .+ s  loss [\d.]+  score 0\.\d+$", text, re.MULTILINE)
    assert "\ncomplete\n" in text
    assert "fp_precision_effective: bf16" in text
    assert re.search(r"^peak_memory_bytes: [\d.]+ [MG]iB$", text, re.MULTILINE)


def test_train_shows_the_traceback_of_a_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_study(tmp_path)
    monkeypatch.setattr("hpo.trial.parts.build_optimizer", lambda *_, **__: 1 / 0)
    finished = hpo_command(tmp_path, "train", "tiny.yaml")
    assert finished.exit_code == 1
    assert "failed: ZeroDivisionError: division by zero" in finished.out
    assert "Traceback (most recent call last)" in finished.err


def test_an_unexpected_error_is_not_swallowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    ended = ok(hpo_command(tmp_path, "verify", "tiny.yaml", "--repeats", "1", "--json"))
    found = ended.json
    assert found.keys() == {"device", "precisions", "recommendation"}
    assert [row["name"] for row in found["precisions"]] == list(PRECISION_NAMES)
    bf16 = found["precisions"][PRECISION_NAMES.index("bf16")]
    assert bf16["compatibility"]["verdict"] == "ok"
    assert 0 < max(bf16["compatibility"]["measurement"]["logits_relative_error"].values()) < 0.1
    assert bf16["compatibility"]["costs"]["speed_ratio"] > 0


# hpo run --timeout


@pytest.mark.parametrize(("pruner", "is_known"), [("promote", True), ("promote", False), ("none", True)])
def test_a_short_timeout_is_stated_before_and_after(tmp_path: Path, pruner: str, is_known: bool) -> None:
    budget = {"max_seconds": 3000} if is_known else {"max_steps": 4}
    training = {"batch_size": 8, "max_length": 64, **budget}
    write_study(tmp_path, pruner={"name": pruner}, training=training)
    text = ok(hpo_command(tmp_path, "run", "tiny.yaml", "--timeout", "0.001")).out
    before = "--timeout is shorter than a whole trial, which takes about 50 min" in text
    assert before == (is_known and pruner == "promote"), "without pauses a trial that has begun ends"
    assert (
        "The time limit has passed: 0 of 2 trials ended, none of them complete. To continue: hpo run "
        "tiny.yaml" in text
    )


# Options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run",), "Missing argument 'STUDY'"),
        (("nonsense",), "No such command 'nonsense'"),
        (("run", "tiny.yaml", "--nonsense"), "No such option: --nonsense"),
        (("run", "tiny.yaml", "--timeout", "nan"), "must be a number of seconds > 0, but got nan"),
        (("worker", "tiny.yaml", "--timeout", "0"), "must be a number of seconds > 0, but got 0"),
        (("run", "tiny.yaml", "--until", "2020-01-01T00:00"), "Error: --until must lie ahead, but got 2020"),
        (("run", "tiny.yaml", "--n-trials", "0"), "'--n-trials'"),
        (
            ("run", "tiny.yaml", "--workers", "1", "--workers-per-device", "2"),
            "Error: --workers 1 counts all processes of this machine and --workers-per-device 2 those of",
        ),
        (("best", "tiny.yaml", "--evaluate", "tset"), "'tset' is not one of 'train', 'validation', 'test'"),
        # More of what `--param` may get wrong is in test_trial_config.py.
        (("train", "tiny.yaml", "-p", "lr=1e-4"), "Did you mean `lora_rank` or `learning_rate`?"),
        (("train", "tiny.yaml", "-p", "learning_rate=nan"), "must be a number, but got `nan`"),
    ],
)
def test_nonsense_options(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    write_study(tmp_path)
    refused(hpo_command(tmp_path, *arguments, width=200), message)
    assert not (tmp_path / "runs").exists()


# Where the study is


@pytest.mark.parametrize("command", ["status", "best", "report", "dashboard"])
def test_reading_commands_make_nothing(tmp_path: Path, command: str) -> None:
    write_study(tmp_path)
    finished = hpo_command(tmp_path, command, "tiny.yaml")
    assert finished.exit_code == 2
    place = f"sqlite:///runs/hpo.db ({tmp_path}/runs/hpo.db)"
    assert f"There is no study database at {place}. `hpo run STUDY` makes one." in finished.err
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.yaml"}


@pytest.mark.parametrize("command", ["run", "worker", "init", "train", "verify"])
def test_working_folder_without_write_access(tmp_path: Path, command: str) -> None:
    write_study(tmp_path)
    (tmp_path / "runs").write_text("no folder")
    finished = hpo_command(tmp_path, command, "tiny.yaml")
    assert finished.exit_code == 2
    assert re.search(r"must be a folder that may be written, but: \w.*\. Run hpo in another", finished.err)
    assert (tmp_path / "runs").read_text() == "no folder"


# Progress and signals


@pytest.mark.parametrize("command", ["run", "train"])
def test_slow_steps_are_logged_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def slow(*_: object, **__: object) -> None:
        logging.getLogger("hpo.data").info("tokenising %s texts", 20_000)
        raise DataError("and then it ends")

    write_study(tmp_path)
    monkeypatch.setattr("hpo.trial.parts.load_data", slow)
    finished = hpo_command(tmp_path, command, "tiny.yaml")
    assert finished.err == "tokenising 20000 texts\nError: and then it ends\n"
    assert hpo_command(tmp_path, command, "tiny.yaml", "--json").err == "Error: and then it ends\n"


def test_a_second_interrupt_ends_at_once_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    def twice() -> None:
        with ended_at_once(), stop_on_signals() as stop:
            stop.can_checkpoint = True
            signal.raise_signal(signal.SIGINT)
            assert stop.wait(60)
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(typer.Exit) as end:
        twice()
    assert end.value.exit_code == 130
    assert "goes on from its last checkpoint" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before


def test_version(tmp_path: Path) -> None:
    assert ok(hpo_command(tmp_path, "--version")).out == f"hpo {hpo.__version__}\n"


def test_ctrl_c_while_the_commands_are_imported_has_no_traceback() -> None:
    program = """
import os, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "hpo.cli.commands":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from hpo.__main__ import main
main()
"""
    finished = subprocess.run(
        [sys.executable, "-c", program, "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert (finished.returncode, finished.stdout, finished.stderr) == (130, "", "")
