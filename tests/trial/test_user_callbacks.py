"""Callbacks of a study's own code."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from support.command_line import finish, ok, saved_steps, start_hpo, stored, wait_until
from support.own_code_studies import write
from support.resumed_trials import check_resume_is_exact, weights_of
from support.tiny import CPU

from hpo.config.resolved_study import resolve_study
from hpo.config.study_config import load_study
from hpo.errors import InputError
from hpo.outcome import TrialResult
from hpo.training.evaluate import Evaluation
from hpo.trial.executor import Executor
from hpo.trial.telemetry import Callbacks

pytestmark = pytest.mark.usefixtures("forgotten")

STEPS = {"max_steps": 16, "batch_size": 8, "max_length": 32, "dropout": 0.1, "fp_precision": "fp32"}
PARAMS = {"learning_rate": 1e-3}

NOTES = '''
import json

import hpo


class Where(hpo.Section):
    file: str = ""
    end_at: int = 0


@hpo.callback("notes", Where)
class Notes:
    """Notes each call in a file, and ends the training after step `end_at`."""

    def __init__(self, options):
        self.options = options

    def note(self, method, state):
        metrics = state.metrics and sorted(state.metrics)
        line = [method, state.step, round(state.budget_used, 3), metrics, state.outcome]
        if self.options.file:
            with open(self.options.file, "a") as file:
                file.write(json.dumps(line) + "\\n")

    def on_step(self, state):
        self.note("step", state)
        return "enough" if state.step == self.options.end_at else None

    def on_evaluation(self, state):
        assert state.values is not None and state.train_loss > 0
        self.note("evaluation", state)

    def on_end(self, state):
        self.note("end", state)
'''


def executor_of(folder: Path, source: str, **changes: Any) -> Executor:
    given = {
        "data": {
            "source": "synthetic",
            "synthetic": {"num_train": 48, "num_validation": 24, "num_test": 24, "max_sentences": 4},
        },
        "objective": {"metric": "score"},
        "training": STEPS,
        "evaluation": {"per_trial": 2},
    }
    study = load_study(write(folder, source, **(given | changes)))
    return Executor(resolve_study(study, CPU), folder / "runs")


def run(executor: Executor, folder: Path | None = None, **params: Any) -> TrialResult:
    return executor.run(PARAMS | params, folder, "trial")


def notes_of(file: Path) -> list[list[Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_callback_sees_steps_evaluations_and_the_end(tmp_path: Path) -> None:
    executor = executor_of(tmp_path, NOTES, training=STEPS | {"max_steps": 4})
    executor.check_study()
    result = run(executor, **{"notes.file": str(tmp_path / "notes")})
    assert str(result.outcome) == "complete", result.reason
    assert result.telemetry["callback_seconds"] > 0
    seen = notes_of(tmp_path / "notes")
    assert [(one[0], one[1], one[2]) for one in seen] == [
        ("step", 1, 0.25),
        ("evaluation", 2, 0.5),
        ("step", 2, 0.5),
        ("step", 3, 0.75),
        ("evaluation", 4, 1.0),
        ("end", 4, 1.0),
    ]
    assert [one[3] is None for one in seen] == [True, False, False, False, False, False]
    assert [one[4] for one in seen] == [""] * 5 + ["complete"]


@pytest.mark.parametrize(("end_at", "steps", "evaluated"), [(3, 3, [3]), (8, 8, [8]), (10, 10, [8, 10])])
def test_callback_ends_the_trial_after_an_evaluation(
    tmp_path: Path, end_at: int, steps: int, evaluated: list[int]
) -> None:
    made: list[Evaluation] = []
    executor = executor_of(tmp_path, NOTES)
    result = executor.run(
        PARAMS | {"notes.end_at": end_at}, tmp_path / "trial", "trial", Callbacks(made.append)
    )
    assert str(result.outcome) == "complete"
    assert [one.step for one in made] == evaluated
    assert [one.index for one in made] == [*range(1, len(made) + 1)]
    assert result.telemetry["num_steps"] == steps
    assert result.reason == (
        f"Training ended early at step {steps}, at {steps / 16:.0%} of its budget: enough (callback notes)."
    )
    assert result.values == max(one.values for one in made)
    assert weights_of(tmp_path / "trial")


ENDS = """
import hpo


@hpo.callback("ends")
class Ends:
    def __init__(self, options):
        pass

    def on_evaluation(self, state):
        return "good enough"
"""


DRAWS = """
import random

import numpy as np
import torch

import hpo


@hpo.callback("draws")
class Draws:
    def __init__(self, options):
        pass

    def on_step(self, state):
        random.random(), np.random.rand(), torch.rand(3)
        state.model.eval()
        weight = next(state.model.parameters())
        assert not (weight * 2).requires_grad

    on_evaluation = on_step
"""


def test_callback_changes_nothing_in_the_trial(tmp_path: Path) -> None:
    results = {}
    for name, source in {"with": DRAWS, "without": ""}.items():
        folder = tmp_path / name
        folder.mkdir()
        result = run(executor_of(folder, source), folder / "trial")
        assert str(result.outcome) == "complete", result.reason
        weights = weights_of(folder / "trial")
        results[name] = (result.values, {key: one.tolist() for key, one in weights.items()})
    assert results["with"] == results["without"]


BROKEN = """
import torch

import hpo


@hpo.callback("broken")
class Broken:
    def __init__(self, options):
        {init}

    def on_step(self, state):
        {step}

    def on_end(self, state):
        {end}
"""


@pytest.mark.parametrize(
    ("init", "step", "end", "message"),
    [
        (
            "pass",
            "return {}['loss']",
            "pass",
            r"failed in on_step: .*own_kind\.py:13: KeyError: 'loss'",
        ),
        ("pass", "return True", "pass", r"`broken` must return None, or a text .* on_step returned True"),
        (
            "pass",
            "next(state.model.parameters()).mul_(2)",
            "pass",
            r"`broken` must not change the weights of the model, but on_step did",
        ),
        ("pass", "state.step = 3", "pass", "`broken` failed in on_step: .*FrozenInstanceError"),
        ("pass", "pass", "raise OSError('disk')", r"`broken` failed in on_end: .*OSError: disk"),
        ("raise OSError('disk')", "pass", "pass", r"A callback failed in its making: .*OSError: disk"),
        ("pass", "raise ValueError", "raise OSError('disk')", "`broken` failed in on_step: .*ValueError"),
    ],
)
def test_faulty_callback_fails_its_trial(
    tmp_path: Path, init: str, step: str, end: str, message: str
) -> None:
    result = run(executor_of(tmp_path, BROKEN.format(init=init, step=step, end=end)))
    assert str(result.outcome) == "failed"
    assert re.search(message, result.reason), result.reason


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            ENDS.replace("on_evaluation", "on_eval"),
            r"`ends` must have one of the methods on_step, on_ev",
        ),
        (ENDS.replace("pass", "raise OSError"), r"own_kind\.py:8: OSError"),
    ],
)
def test_callback_is_checked_before_the_study_is_made(tmp_path: Path, source: str, message: str) -> None:
    executor = executor_of(tmp_path, source)
    with pytest.raises(InputError, match=message):
        executor.check_study()


def test_resume_with_a_callback_is_exact(tmp_path: Path) -> None:
    executor = executor_of(tmp_path, NOTES, evaluation={"per_trial": 4})
    check_resume_is_exact(executor, tmp_path, 9, **PARAMS, **{"notes.end_at": 10})


def test_trial_with_a_callback_resumes_after_kill_9(tmp_path: Path) -> None:
    executor_of(  # writes the study
        tmp_path,
        NOTES,
        training={**STEPS, "max_steps": 120, "notes.file": "notes", "notes.end_at": 100},
        evaluation={"per_trial": 10, "patience": 10},
        checkpoint={"every_seconds": 0.05},
        n_trials=1,
    )
    process = start_hpo(tmp_path, "run", "tiny.yaml")
    wait_until(lambda: bool(saved_steps(tmp_path)), process)
    process.kill()
    assert finish(process).exit_code == -signal.SIGKILL
    assert stored(tmp_path).counts["done"] == 0, "killed too late to test anything"
    ok(finish(start_hpo(tmp_path, "run", "tiny.yaml")))
    (trial,) = stored(tmp_path).trials
    assert (trial.outcome, trial.telemetry["num_steps"]) == ("complete", 100)
    assert trial.telemetry["resumed_from_step"] > 0
    assert trial.telemetry["stopped_early"].endswith("enough (callback notes).")
    seen = notes_of(tmp_path / "notes")
    assert [one for one in seen if one[0] == "end"] == [["end", 100, 0.833, seen[-1][3], "complete"]]


def test_energy_excludes_on_step(tmp_path: Path) -> None:
    limits = {"train_joules_per_example": {"max": 1.0}}
    with pytest.raises(InputError, match=r"`notes` has `on_step`, so train_joules_per_example"):
        executor_of(tmp_path, NOTES, constraints=limits).check_study()
