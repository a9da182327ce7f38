"""What is on the screen, at the width of a terminal and in a log file."""

from __future__ import annotations

import dataclasses
import io
import re
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from study_records import fake_record, fake_trial, record_of, with_values
from tiny import tiny_study

from hpo.cli import display
from hpo.cli.progress import StudyDisplay
from hpo.precision.table import PRECISION_NAMES, Support
from hpo.report.formats import describe_params
from hpo.report.status import study_status
from hpo.study.study_record import WorkerRecord
from hpo.study.watch import TrialEvent
from hpo.trial.compat import Compatibility
from hpo.trial.measure import Measurement
from hpo.trial.verify import PrecisionCheck

PARAMS = {"fp_precision": "bf16", "learning_rate": 3.14159e-4, "batch_size": 16, "init_scale": 65536.0}
LONG = "`tf32` needs compute capability >= 8.0, but this is a CPU [of a kind]. Use fp32 or bf16."
WIDTHS = (80, 120)


class Screen:
    """A console whose output can be read."""

    def __init__(self, width: int, terminal: bool = True) -> None:
        self._file = io.StringIO()
        self.console = Console(
            file=self._file, width=width, height=40, force_terminal=terminal, color_system=None
        )

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._file.getvalue()).replace("\r", "")

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.text.splitlines()]


@pytest.fixture
def screen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Screen:
    """Where `display` prints; of the width that the test is parametrised with."""
    made = Screen(getattr(request, "param", 100))
    monkeypatch.setattr(display, "Console", lambda **_: made.console)
    return made


def rendered(shown: StudyDisplay, width: int = 80) -> str:
    """What the live part looks like now."""
    console = Console(file=io.StringIO(), width=width, record=True, color_system=None)
    console.print(shown._render())
    return console.export_text()


def new_display(
    tmp_path: Path, screen: Screen, record: Any = None, stop: Any = None, **changes: Any
) -> StudyDisplay:
    """The display of a study of two trials, of which one is done now; `changes` are of its file."""
    record = record or record_of([], slots={"open": 2, "running": 0, "done": 0})
    config = tiny_study(tmp_path, **changes)
    return StudyDisplay(config, record, lambda: 1, stop=stop or threading.Event(), console=screen.console)


def test_params_are_short_or_exact() -> None:
    shown = "fp_precision=bf16 learning_rate=0.000314 batch_size=16 init_scale=65536"
    assert describe_params(PARAMS) == shown
    assert "learning_rate=0.000314159" in describe_params(PARAMS, in_full=True)


def test_live_display_of_a_trial(tmp_path: Path, screen: Screen) -> None:
    shown = new_display(tmp_path, screen, evaluation={"per_trial": 4})
    assert "getting ready" in rendered(shown)
    assert "0/2 trials" in rendered(shown)
    shown.update(TrialEvent("started", 0, PARAMS))
    assert re.search(r"trial 0 .* 0% .*fp_precision=bf16 learning_rate=0.000314", rendered(shown))
    shown.update(TrialEvent("evaluated", 0, PARAMS, (0.5,), 1))
    assert re.search(r"trial 0 .* 25% score 0\.5 ", rendered(shown))
    assert "best so far: none yet" in rendered(shown)
    shown.update(TrialEvent("finished", 0, PARAMS, (0.625,), outcome="complete"))
    assert "best so far: score 0.625 (trial 0)" in rendered(shown)
    assert "1/2 trials" in rendered(shown)
    assert "trial 0 " not in rendered(shown).replace("(trial 0)", "")
    assert all(len(line) <= 80 for line in rendered(shown).splitlines())


def test_progress_of_a_trial_is_counted_in_evaluations(tmp_path: Path, screen: Screen) -> None:
    shown = new_display(tmp_path, screen, evaluation={"per_epoch": 2}, training={"epochs": 3})
    shown.update(TrialEvent("started", 0, {}, num_evaluations=1))
    assert "17%" in rendered(shown), "it goes on from where it was"
    for number, percent in ((2, 33), (3, 50)):
        shown.update(TrialEvent("evaluated", 0, {}, (0.5,), number))
        assert f"{percent}%" in rendered(shown)


@pytest.mark.parametrize(("direction", "best"), [("maximize", 1), ("minimize", 2)])
def test_best_so_far_goes_on_from_the_stored_study(
    tmp_path: Path, screen: Screen, direction: str, best: int
) -> None:
    slots = {"open": 3, "running": 0, "done": 1}
    stored = record_of([with_values(0, (0.5,))], slots=slots, directions=(direction,))
    shown = new_display(tmp_path, screen, stored, objective={"metric": "score", "direction": direction})
    assert "best so far: score 0.5 (trial 0)" in rendered(shown)
    for number, value in ((1, 0.75), (2, 0.25)):
        shown.update(TrialEvent("finished", number, {}, (value,), outcome="complete"))
    shown.update(TrialEvent("finished", 3, {}, outcome="nonfinite", reason="the loss is NaN"))
    assert f"(trial {best})" in rendered(shown)


def test_the_display_says_that_it_stops(tmp_path: Path, screen: Screen) -> None:
    stop = threading.Event()
    shown = new_display(tmp_path, screen, stop=stop)
    assert "Stopping" not in rendered(shown)
    stop.set()
    assert "Stopping when the checkpoint is written. Ctrl-C again ends at once" in rendered(shown)


@pytest.mark.parametrize("screen", WIDTHS, indirect=True)
def test_lines_of_finished_trials_are_indented_in_a_terminal(tmp_path: Path, screen: Screen) -> None:
    shown = new_display(tmp_path, screen)
    shown.update(TrialEvent("finished", 7, PARAMS, (0.625,), outcome="complete"))
    shown.update(TrialEvent("finished", 8, PARAMS, outcome="unsupported", reason=LONG))
    lines = screen.lines
    assert lines[0].startswith("trial   7  complete     0.625  fp_precision=bf16")
    assert any(line.startswith("trial   8  unsupported  fp_precision=bf16") for line in lines)
    assert LONG in " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= screen.console.width
    assert {line[:24].strip() for line in lines} == {"trial   7  complete", "trial   8  unsupported", ""}


def test_a_log_file_has_a_line_for_each_evaluation_and_each_end(tmp_path: Path) -> None:
    screen = Screen(80, terminal=False)
    with new_display(tmp_path, screen, evaluation={"per_trial": 4}) as shown:
        shown.update(TrialEvent("started", 8, PARAMS))
        shown.update(TrialEvent("evaluated", 8, PARAMS, (0.5,), 1, 75.0))
        shown.update(TrialEvent("finished", 8, PARAMS, outcome="unsupported", reason=LONG))
    assert screen.lines == [
        "trial   8  evaluation 1 of 4  score 0.5  1 min 15 s",
        f"trial   8  unsupported   {describe_params(PARAMS)}  {LONG}",
    ]


# Summaries


def all_precisions() -> Any:
    """Complete trials in each precision, and one of every other outcome."""
    trials = [fake_trial(0, "fp32")]
    for number, name in enumerate(PRECISION_NAMES, start=1):
        known = fake_trial(number, name if name in ("fp32", "bf16", "fp16") else "bf16")
        telemetry = {**known.telemetry, "precision": {**known.telemetry["precision"]}}
        telemetry["precision"] |= {"requested": name, "effective": name}
        params = {**known.params, "fp_precision": name}
        trials.append(dataclasses.replace(known, params=params, telemetry=telemetry))
    return record_of(trials, slots={"open": 0, "running": 0, "done": len(trials)})


@pytest.mark.parametrize("screen", WIDTHS, indirect=True)
@pytest.mark.parametrize("record", [fake_record(), all_precisions()], ids=["outcomes", "precisions"])
def test_summary_fits_the_terminal(screen: Screen, record: Any) -> None:
    display.print_summary(record)
    assert max(map(len, screen.lines)) <= screen.console.width
    assert "…" not in screen.text, "no name or number is cut"
    assert "by requested precision" in screen.text
    table = screen.text.split("by requested precision")[1].split("best trial")[0]
    names = {trial.params["fp_precision"] for trial in record.trials}
    assert names <= set(table.split())
    assert {"native", "emulated"} <= set(table.split())
    assert re.search(r"^best trial \d+: score 0\.\d+$", screen.text, re.MULTILINE)
    assert "   hpo best fake\n" in screen.text


def test_summary_without_an_ended_trial(screen: Screen) -> None:
    display.print_summary(record_of([fake_trial(0, "fp32", "running")]))
    assert screen.text == "No complete trial of 1.\n"


@pytest.mark.parametrize("screen", WIDTHS, indirect=True)
def test_status(screen: Screen) -> None:
    record = fake_record()
    display.print_status(record, study_status(record))
    assert "fake: 38 of 40 trials done, 0 running, 2 to come" in screen.text, "the one's worker is gone"
    for outcome in ("complete", "nonfinite", "incompatible", "unsupported", "oom", "failed", "preempted"):
        assert re.search(rf"^ +{outcome} +\d+$", "\n".join(screen.lines), re.MULTILINE)
    assert "Unfinished, with no worker: 2. The next worker goes on with them." in screen.text
    assert max(map(len, screen.lines)) <= screen.console.width


@pytest.mark.parametrize("screen", WIDTHS, indirect=True)
def test_status_shows_jobs_and_who_runs_what_where(screen: Screen) -> None:
    now, known = datetime.now(UTC), {"device": "GPU-7f", "job": "slurm:123_4", "silent_seconds": 12.0}
    worker = WorkerRecord("node1-7-abc", "node1", 7, now, alive=True, trial_number=3, number=5, **known)
    job = {"id": "slurm:123", "host": "login", "num_workers": 8, "created": "today", "reason": "Priority"}
    record = record_of([fake_trial(3, "fp32", "running")], workers=[worker])
    status = study_status(record) | {"jobs": [{**job, "states": {"running": 5, "pending": 3}}]}
    display.print_status(record, status)
    text = " ".join(screen.text.split())
    assert "slurm:123 5 running, 3 pending (Priority) 8 login today" in text
    assert "5 node1 GPU-7f slurm:123_4 3 12 s ago" in text


def test_pareto_front_begins_with_the_best_of_the_first_objective(screen: Screen) -> None:
    record = record_of(
        [with_values(0, (0.5, 2e9)), with_values(1, (0.75, 4e9)), with_values(2, (0.25, 3e9))],
        metric_names=("score", "peak_memory_bytes"),
        directions=("maximize", "minimize"),
    )
    display.print_best(record)
    assert re.findall(r"best trial (\d): (.*)", screen.text) == [
        ("1", "score 0.75, peak_memory_bytes 3.73 GiB"),
        ("0", "score 0.5, peak_memory_bytes 1.86 GiB"),
    ]


@pytest.mark.parametrize("screen", WIDTHS, indirect=True)
def test_verification(screen: Screen) -> None:
    measurement = Measurement(
        "bf16",
        logits_relative_error={"a": 1.25e-3, "b": 4e-3},
        gradient_cosine=0.99912,
        speed_ratio=2.5,
        speed_ratio_low=2.125,
        speed_ratio_high=2.75,
        memory_ratio=0.75,
    )
    checks = [
        PrecisionCheck("bf16", Support("native"), Compatibility("incompatible", (), measurement), LONG),
        PrecisionCheck("bf16-true", Support("unsupported", LONG), None, LONG),
    ]
    display.print_verification(checks, "NVIDIA [H200]", "Use fp32.")
    assert "NVIDIA [H200]" in screen.text
    row = r"bf16 +native +incompatible +4\.0e-03 +0\.9991 +2\.50x +0\.75x"
    assert re.search(row, screen.text)
    assert "(2.12-2.75)" in screen.text
    assert "gradient" in screen.text
    assert "…" not in screen.text
    assert " ".join(screen.text.split()).count(LONG) == 2
    assert screen.lines[-1] == "Use fp32."
    assert max(map(len, screen.lines)) <= screen.console.width


def test_names_with_brackets_are_shown_as_they_are(screen: Screen) -> None:
    display.print_metrics({"topics[0]": {"f1_macro": 0.5}}, "Trial 0 on [test]")
    assert re.search(r"topics\[0\] +f1_macro +0\.5", screen.text)
    assert "on [test]" in screen.text
