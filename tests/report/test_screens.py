import io
import re
from pathlib import Path
from typing import Any

import pytest
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial
from rich.console import Console
from support.detailed_documents import document, nothing_known, task_document
from support.tiny import tiny_study

from hpo.device_time import REMEDY, DeviceTime, busy_text
from hpo.outcome import Outcome
from hpo.report import best_screens, screens, terminal, trial_screens
from hpo.report.detailed import Detailed
from hpo.report.formats import describe_params
from hpo.report.screens import StudyDisplay
from hpo.report.terminal import print_parts
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


def running(*values: float, progress: Any = None, number: int = 0) -> StudyProgress:
    return StudyProgress([(watched(number, "", "", *values), progress or {})])


STEP = {"step": 30, "budget_used": 0.4, "train_loss": 1.25, "examples_per_second": 208.7}


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_line_every_half_minute_and_one_for_each_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    screen, clock = Screen(250 if is_terminal else 80, is_terminal), [0.0]
    monkeypatch.setattr(screens.time, "monotonic", lambda: clock[0])
    shown = StudyDisplay(tiny_study(tmp_path, n_trials=2), console=screen)
    for second in range(50):
        clock[0] = float(second)
        here = {**STEP, "step": second, "budget_used": second / 100}
        shown.show(running(0.5, progress=here, number=8))
    clock[0] = 61.0
    shown.show(running(number=9))
    clock[0] = 92.0
    shown.show(running(progress={**STEP, "train_loss": None, "examples_per_second": None}, number=9))
    ended = [watched(7, "complete", "", 0.625), watched(8, "unsupported", LONG)]
    shown.show(StudyProgress([], ended, best=(0.625, 7), num_done=2))
    assert [line.rstrip() for line in screen.text.splitlines()] == [
        "trial   8   30%  score 0.5  step 30  loss 1.25  209 ex/s",
        "trial   9  running, no step reported",
        "trial   9   40%  step 30",
        f"trial   7  complete      score 0.625  {describe_params(PARAMS)}  2/2 trials  best score so far",
        f"trial   8  unsupported   {describe_params(PARAMS)}  {LONG}  2/2 trials",
    ]


def test_busy_machine_is_named_at_its_start_and_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, clock, busy = Screen(250), [0.0], {"programs": 0.62, "stolen": 0.0, "share": 0.38, "busy": True}
    monkeypatch.setattr(screens.time, "monotonic", lambda: clock[0])
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
