import ast
import json
import re
import signal
import urllib.request
from pathlib import Path

import pytest
import typer
from support.command_line import COMMANDS, Finished, finish, hpo_command, ok, refused, start_hpo, start_python
from support.tiny import write_study

from hpo.cli.options import ended_at_once
from hpo.study.running.stopping import stop_on_signals
from hpo.study.store.storage import open_storage


def slow_modules_after(folder: Path, *arguments: str) -> set[str]:
    """Run `hpo` in a new process in `folder` and return its imported modules that take long."""
    names = ("torch", "transformers", "datasets", "pandas", "sklearn", "scipy", "plotly", "optuna")
    names += ("sqlalchemy",)
    code = (
        f"import sys, hpo.cli.commands\nsys.argv = ['hpo', *{arguments}]\n"
        "try: hpo.cli.commands.main()\nexcept SystemExit: pass\n"
        f"print([name for name in {names} if name in sys.modules])"
    )
    return set(ast.literal_eval(finish(start_python(folder, "-c", code)).out.splitlines()[-1]))


def test_help_imports_no_slow_module(tmp_path: Path) -> None:
    assert slow_modules_after(tmp_path, "run", "--help") == set()


@pytest.mark.parametrize(
    "arguments",
    [
        ("studies",),
        ("status", "tiny"),
        ("best", "tiny"),
        ("pause", "tiny"),
        ("enqueue", "tiny", "-p", "learning_rate=1e-4"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_command_without_models_imports_no_slow_module(
    folder: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """`best` needs pandas for its caveats, but no models."""
    found = slow_modules_after(tmp_path, *arguments, "--storage", f"sqlite:///{folder}/runs/hpo.db")
    assert not found & {"transformers", "datasets", "plotly"}
    assert "pandas" not in found or arguments[0] == "best"
    assert "torch" not in found or arguments[0] != "studies"
    assert "sqlalchemy" in found


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_explains_its_options_and_takes_json(name: str) -> None:
    command = COMMANDS[name]
    assert command.help
    assert all(parameter.help for parameter in command.params)
    assert "--json" in [option for parameter in command.params for option in parameter.opts]


def test_run_prints_progress_and_a_summary(folder: Path) -> None:
    text = ok(hpo_command(folder, "run", "tiny.yaml", "--n-trials", "3")).out
    place = f"sqlite:///runs/hpo.db ({folder}/runs/hpo.db)"
    assert f"Study tiny (resumed): 2 of 3 trials ended, in {place}." in text
    line = r"^trial   2  complete +score 0\.\d+  learning_rate=\S+  3/3 trials(  best score so far)?$"
    assert re.search(line, text, re.MULTILINE)
    assert re.search(r"^best trial \d: score 0\.\d+ \(best constant prediction 0\.\d+\)$", text, re.MULTILINE)
    assert "requested fp32, ran fp32 (native), observed: products of 17 weight matrices in float32" in text


def test_init_makes_a_study_without_trials(tmp_path: Path) -> None:
    write_study(tmp_path)
    made = ok(hpo_command(tmp_path, "init", "tiny.yaml", "--n-trials", "5", "--json")).json
    assert made["trials"] == {"open": 5, "running": 0, "done": 0}
    text = ok(hpo_command(tmp_path, "init", "tiny.yaml")).out
    assert text.startswith("The study tiny with 2 trials is ready in sqlite:///runs/hpo.db (")
    assert "0 trials, none complete." in ok(hpo_command(tmp_path, "status", "tiny")).out
    assert hpo_command(tmp_path, "best", "tiny").exit_code == 1
    assert ok(hpo_command(tmp_path, "report", "tiny")).out == "runs/tiny/report/report.html\n"


def test_dashboard_prints_its_address_and_ends_on_ctrl_c(folder: Path) -> None:
    options = ("--port", "0", "--host", "127.0.0.2")
    process = start_hpo(folder, "dashboard", "tiny.yaml", *options, PYTHONUNBUFFERED="1")
    line = process.stdout.readline()
    found = re.fullmatch(r"http://(127\.0\.0\.2:\d+)/dashboard/studies/1 \(Ctrl-C ends it\)\n", line)
    assert found, line or finish(process)
    with urllib.request.urlopen(f"http://{found[1]}/api/studies/1") as answer:
        assert json.load(answer)["name"] == "tiny"
    process.send_signal(signal.SIGINT)
    assert finish(process) == Finished(0, "", f"Warning: whoever reaches {found[1]} can delete studies.\n")


def test_train_prints_the_record_of_a_trial(ran: Path, tmp_path: Path) -> None:
    write_study(tmp_path)
    record = ok(hpo_command(tmp_path, "train", "tiny.yaml", "-p", "learning_rate=2e-4", "--json")).json
    with open_storage(f"sqlite:///{ran}/runs/hpo.db") as storage:
        stored = storage.load_study("tiny").trials[0]
    assert record.keys() == {"params", "values", *stored.user_attrs} - {"worker", "active_seconds"}
    assert record["params"] == {"learning_rate": 2e-4}
    assert record["telemetry"].keys() == stored.user_attrs["telemetry"].keys()
    assert not any((tmp_path / "runs" / "tiny").iterdir()), "it keeps no checkpoint"
    assert not (tmp_path / "runs" / "hpo.db").exists()
    text = ok(hpo_command(tmp_path, "train", "tiny.yaml", "--param", "fp_precision=bf16")).out
    assert re.search(r"^step 4  100%  .+ s  loss [\d.]+  score 0\.\d+$", text, re.MULTILINE)
    assert "\ncomplete\n" in text
    assert "fp_precision_effective: bf16" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("worker",), "Missing argument 'STUDY'"),
        (("run", "tiny.yaml", "--timeout", "nan"), "must be a number of seconds > 0, but got nan"),
        (("run", "tiny.yaml", "--until", "2020-01-01T00:00"), "Error: --until must lie ahead, but got 2020"),
        (("run", "tiny.yaml", "--n-trials", "0"), "'--n-trials'"),
        (("run", "tiny.yaml", "--workers", "1", "--workers-per-device", "2"), "Error: --workers 1 counts"),
        (("best", "tiny.yaml", "--evaluate", "tset"), "'tset' is not one of 'train', 'validation', 'test'"),
        (("best", "tiny.yaml", "--into", "there"), "give --reproduce, too"),
        (("status", "tiny.yaml", "--watch", "--json"), "--json must be left out"),
        (("train", "tiny.yaml", "-p", "lr=1e-4"), "Did you mean `lora_rank` or `learning_rate`?"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    write_study(tmp_path)
    refused(hpo_command(tmp_path, *arguments, width=200), message)
    assert not (tmp_path / "runs").exists()


def test_a_folder_without_write_access_is_refused(tmp_path: Path) -> None:
    write_study(tmp_path)
    (tmp_path / "runs").write_text("no folder")
    for command in ("run", "worker", "init", "train", "verify"):
        refused(hpo_command(tmp_path, command, "tiny.yaml"), "must be a writable folder, but: ")
    assert (tmp_path / "runs").read_text() == "no folder"


def test_a_second_interrupt_ends_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt_twice() -> None:
        with ended_at_once(), stop_on_signals() as stop:
            stop.can_checkpoint = True
            signal.raise_signal(signal.SIGINT)
            assert stop.wait(60)
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(typer.Exit) as end:
        interrupt_twice()
    assert end.value.exit_code == 130
    assert "Ended at once." in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before
