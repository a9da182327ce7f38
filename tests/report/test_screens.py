import io
import re
from pathlib import Path
from typing import Any

import pytest
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial
from rich.cells import cell_len
from rich.console import Console
from support.detailed_documents import document, nothing_known, task_document
from support.tiny import tiny_study

from hpo.device_time import REMEDY, DeviceTime, busy_text
from hpo.outcome import Outcome, Progress
from hpo.report import best_screens, progress, terminal, trial_screens
from hpo.report.detailed import Detailed
from hpo.report.formats import describe_params
from hpo.report.progress import StudyDisplay
from hpo.report.terminal import Shown, as_html, print_parts
from hpo.study.reading.watch import StudyProgress

PARAMS = {"fp_precision": "bf16", "learning_rate": 3.14159e-4, "batch_size": 16, "init_scale": 65536.0}
LONG = "`tf32` needs compute capability >= 8.0, but this is a CPU [of a kind]. Use fp32 or bf16."


class Screen(Console):
    def __init__(self, width: int = 80, is_terminal: bool = True) -> None:
        super().__init__(
            file=io.StringIO(), width=width, height=40, force_terminal=is_terminal, color_system=None
        )

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.file.getvalue()).replace("\r", "")


def watched(number: int, outcome: str = "", reason: str = "", *values: float) -> FrozenTrial:
    """Return a trial with this outcome, or a running one with these reports."""
    trial = create_trial(
        state=TrialState[Outcome(outcome).optuna_state] if outcome else TrialState.RUNNING,
        values=values if outcome == "complete" else None,
        intermediate_values={} if outcome else dict(enumerate(values, start=1)),
        params=PARAMS,
        distributions={name: CategoricalDistribution([value]) for name, value in PARAMS.items()},
        user_attrs={"outcome": outcome, "outcome_reason": reason} if outcome else {},
    )
    trial.number = number
    return trial


def running(number: int, **progress: Any) -> StudyProgress:
    return StudyProgress([(watched(number), Progress(**progress))])


STEP = {"step": 30, "budget_used": 0.4, "train_loss": 1.25, "examples_per_second": 208.7, "num_steps": 1200}
EVALUATION = {"part": "evaluation", "part_done": 0.4, "num_texts": 143, "num_windows": 16_000}


def display(
    folder: Path, screen: Screen, monkeypatch: pytest.MonkeyPatch, **environment: str
) -> StudyDisplay:
    for name in ("CI", "NO_COLOR", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return StudyDisplay(tiny_study(folder, n_trials=2), console=screen)


@pytest.mark.parametrize("environment", [None, {"CI": "true"}, {"TERM": "dumb"}])
def test_a_log_has_a_line_every_half_minute_and_one_for_each_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str] | None
) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    if environment:
        monkeypatch.setenv("TERM", environment.get("TERM", "xterm"))
    screen = Screen(250 if environment else 80, bool(environment))
    shown = display(tmp_path, screen, monkeypatch, **environment or {})
    for second in range(50):
        clock[0] = float(second)
        shown.show(running(8, **{**STEP, "step": second, "budget_used": second / 100, "best": 0.5}))
    for seconds, here in ((61.0, {"part": "check"}), (92.0, STEP | EVALUATION), (123.0, {"step": 3})):
        clock[0] = seconds
        shown.show(running(9, **here))
    ended = [watched(7, "complete", "", 0.625), watched(8, "unsupported", LONG)]
    shown.show(StudyProgress([], ended, best=(0.625, 7), num_done=2))
    assert [line.rstrip() for line in screen.text.splitlines()] == [
        "trial   8   30%  step 30/1,200  209 ex/s  loss 1.25  best 0.5",
        "trial   9  check",
        "trial   9  evaluating 143 texts (16,000 windows), 40 %  step 30/1,200  209 ex/s  loss 1.25",
        "trial   9    0%  step 3, 0%",
        f"trial   7  complete      score 0.625  {describe_params(PARAMS)}  2/2 trials  best score so far",
        f"trial   8  unsupported   {describe_params(PARAMS)}  {LONG}  2/2 trials",
    ]


@pytest.mark.parametrize("width", [44, 80, 120])
def test_a_terminal_has_a_bar_for_each_running_trial_below_other_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    screen = Screen(width)
    shown = display(tmp_path, screen, monkeypatch)
    trials = [(watched(8), Progress(**STEP, best=0.5)), (watched(9), Progress(**STEP | EVALUATION))]
    with shown.live:
        shown.show(StudyProgress(trials))
        frame = screen.text
        shown.show(StudyProgress(trials, [watched(7, "complete", "", 0.625)]))
        raw = screen.file.getvalue()
    assert max(map(cell_len, frame.splitlines())) <= width
    assert re.search(r"^trial   8 training   ━+.*(\n.*)?step 30/1,200  209 ex/s", frame, re.MULTILINE)
    assert re.search(r"^trial   9 evaluation ━+.*(\n.*)?6,400/16,000 windows", frame, re.MULTILINE)
    after = screen.text.removeprefix(frame)
    assert after.index("trial   7  complete") < after.index("trial   8 training")
    assert raw.count("\x1b[?25h") == 2, "the cursor is visible, also if the process is killed now"


def test_busy_machine_is_named_at_its_start_and_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, clock, busy = Screen(250), [0.0], {"programs": 0.62, "stolen": 0.0, "share": 0.38, "busy": True}
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(DeviceTime, "facts", lambda _: busy | {"busy": not 60 < clock[0] < 120})
    shown = StudyDisplay(tiny_study(tmp_path, n_trials=2), console=screen)
    lines = {}
    for second in range(150):
        clock[0], before = float(second), screen.text
        shown.show(StudyProgress())
        if screen.text != before:
            lines[second] = screen.text.removeprefix(before).strip()
    text = f"This machine is {busy_text(busy)}. {REMEDY}"
    assert lines == {2: text, 62: "This machine is no longer busy.", 122: text}


def test_text_of_others_is_neither_markup_nor_a_terminal_command(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(terminal, "Console", lambda **_: screen)
    nasty, plain = "[red]a\x1b[2J\nb[/red]", "[red]a [2J b[/red]"
    task = task_document("single_label", {"accuracy": 0.5}, warnings=[nasty])
    print_parts(best_screens.detailed(Detailed(7, "test", document({nasty: task}))))
    assert f"Warning: {plain}: {plain}" in screen.text
    assert screen.text.count(plain) == 3
    print_parts(best_screens.detailed(Detailed(7, "test", nothing_known())))
    assert re.search(r"empty +f1_macro +–", screen.text)


def test_speed_of_a_precision_is_a_median() -> None:
    """`Costs.speed_ratio` is this median."""
    *_, note, advice = trial_screens.verification([], "EPYC", "Use fp32.")
    assert "Speed (median of the repeats)" in str(note)
    assert str(advice) == "Use fp32."


class Result(Shown):
    def text(self) -> Any:
        yield "<script>", [{"class <b>": "<script>alert(1)</script>", "empty": "", "rows": "3"}]
        yield "", []
        yield "  indented & escaped"


def test_a_notebook_shows_escaped_tables() -> None:
    shown = Result()._repr_html_()
    assert not re.search("<script|<b>|empty", shown)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in shown
    assert shown.count("<table>") == 1
    assert "  indented &amp; escaped" in shown
    assert "<p" in as_html("one text")
