"""Callbacks of a study's own code."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.resumed_trials import check_resume_is_exact, weights_of
from support.tiny import tiny_executor

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
        if self.options.file:
            with open(self.options.file, "a") as file:
                line = [method, state.step, round(state.budget_used, 3), bool(state.metrics), state.outcome]
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
    (folder / "own.py").write_text(source)
    given = {"code": "own.py", "training": STEPS, "evaluation": {"per_trial": 2}}
    return tiny_executor(folder, **(given | changes))


def run(executor: Executor, folder: Path | None = None, **params: Any) -> TrialResult:
    return executor.run(PARAMS | params, folder, "trial")


def test_callback_sees_steps_evaluations_and_the_end(tmp_path: Path) -> None:
    executor, file = executor_of(tmp_path, NOTES, training=STEPS | {"max_steps": 4}), tmp_path / "notes"
    result = run(executor, **{"notes.file": str(file)})
    assert str(result.outcome) == "complete", result.reason
    assert result.telemetry["callback_seconds"] > 0
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        ["step", 1, 0.25, False, ""],
        ["evaluation", 2, 0.5, True, ""],
        ["step", 2, 0.5, True, ""],
        ["step", 3, 0.75, True, ""],
        ["evaluation", 4, 1.0, True, ""],
        ["end", 4, 1.0, True, "complete"],
    ]


@pytest.mark.parametrize(("end_at", "evaluated"), [(3, [3]), (8, [8]), (10, [8, 10])])
def test_callback_ends_after_an_evaluation(tmp_path: Path, end_at: int, evaluated: list[int]) -> None:
    made: list[Evaluation] = []
    params = PARAMS | {"notes.end_at": end_at}
    result = executor_of(tmp_path, NOTES).run(params, tmp_path / "trial", "trial", Callbacks(made.append))
    assert (str(result.outcome), result.telemetry["num_steps"]) == ("complete", end_at)
    assert [one.step for one in made] == evaluated
    used = f"at step {end_at}, at {end_at / 16:.0%} of its budget"
    assert result.reason == f"Training ended early {used}: enough (callback notes)."
    assert result.values == max(one.values for one in made)
    assert weights_of(tmp_path / "trial")


def test_callback_changes_nothing_in_the_trial(tmp_path: Path) -> None:
    draw = "import random, numpy; random.random(), numpy.random.rand(), torch.rand(3); state.model.eval()"
    draw += "; assert not (next(state.model.parameters()) * 2).requires_grad"
    results = []
    for source in (BROKEN.format(step=draw, end="pass"), ""):
        result = run(executor_of(tmp_path, source), folder := tmp_path / f"trial {len(source)}")
        assert str(result.outcome) == "complete", result.reason
        weights = weights_of(folder)
        results.append((result.values, {key: one.tolist() for key, one in weights.items()}))
    assert results[0] == results[1]


BROKEN = """
import torch

import hpo


@hpo.callback("broken")
class Broken:
    def __init__(self, options): pass

    def on_step(self, state):
        {step}

    def on_end(self, state):
        {end}
"""


@pytest.mark.parametrize(
    ("step", "end", "message"),
    [
        ("return {}['loss']", "pass", r"failed in on_step: .*own\.py:12: KeyError: 'loss'"),
        ("return True", "pass", r"`broken` must return None, or a text .* on_step returned True"),
        ("next(state.model.parameters()).mul_(2)", "pass", "must not change the weights .*, but on_step did"),
        ("state.step = 3", "pass", "`broken` failed in on_step: .*FrozenInstanceError"),
        ("pass", "raise OSError('disk')", r"`broken` failed in on_end: .*OSError: disk"),
        ("raise ValueError", "raise OSError('disk')", "`broken` failed in on_step: .*ValueError"),
    ],
)
def test_faulty_callback_fails_its_trial(tmp_path: Path, step: str, end: str, message: str) -> None:
    result = run(executor_of(tmp_path, BROKEN.format(step=step, end=end)))
    assert str(result.outcome) == "failed"
    assert re.search(message, result.reason), result.reason


def test_resume_with_a_callback_is_exact(tmp_path: Path) -> None:
    executor = executor_of(tmp_path, NOTES, evaluation={"per_trial": 4})
    check_resume_is_exact(executor, tmp_path, 9, **PARAMS, **{"notes.end_at": 10})
