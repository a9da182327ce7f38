"""The trials of a study in the view of the Gaussian process."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
from optuna.trial import TrialState
from support.scripted_study import ScriptedStudy
from support.worker_process import study

from hpo.study.sampling.gp_sampler import PrunedAwareSampler


def scripted(direction: str = "maximize") -> ScriptedStudy:
    objective = {"metric": "score", "direction": direction}
    return ScriptedStudy(study(12, objective=objective), lambda _: 0.5)


def run_trial(current: ScriptedStudy, evaluations: list[float], ended: Any) -> None:
    trial, _ = current.ask()
    for step, score in enumerate(evaluations, start=1):
        trial.report(score, step)
    current.end(trial, ended)


def view_of(current: ScriptedStudy) -> list[optuna.trial.FrozenTrial]:
    return PrunedAwareSampler(optuna.samplers.RandomSampler(seed=0)).view(current.study).trials


@pytest.mark.parametrize(("direction", "sign"), [("maximize", 1.0), ("minimize", -1.0)])
def test_a_pruned_trial_has_the_value_of_its_best_evaluation(direction: str, sign: float) -> None:
    current = scripted(direction)
    run_trial(current, [sign * 0.1, sign * 0.5], sign * 0.5)
    run_trial(current, [sign * 0.3, sign * 0.2], "pruned")
    run_trial(current, [], "pruned")
    *known, unknown = view_of(current)
    assert unknown.state == TrialState.PRUNED, "it has no evaluation"
    assert {trial.state for trial in known} == {TrialState.COMPLETE}
    assert [trial.value for trial in known] == [sign * 0.5, sign * 0.3]
    assert current.trials[1].state == TrialState.PRUNED


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
@pytest.mark.parametrize("num_complete", [0, 2])
def test_an_infeasible_trial_has_the_worst_value(direction: str, num_complete: int) -> None:
    sign = 1.0 if direction == "maximize" else -1.0
    current = scripted(direction)
    for number in range(5):
        run_trial(current, [sign * (5.0 - number)], sign * 6.0 if number < num_complete else "pruned")
    run_trial(current, [0.0], "nonfinite")
    *others, infeasible = [trial.values[0] for trial in view_of(current)]
    assert infeasible == (min if direction == "maximize" else max)(others)


def test_trials_at_rungs_have_the_value_of_the_first_rung() -> None:
    """Also complete trials. A trial that broke later is infeasible."""
    current = scripted()
    at_rungs = [(0.3, 0.7), (0.2, 0.8), (0.1,)]
    for scores, ended in zip(at_rungs, ["complete", "nonfinite", "paused"], strict=True):
        trial, _ = current.ask()
        rungs = zip(("0.04", "0.12"), scores, strict=False)
        trial.set_user_attr("rungs", {at: {"values": [score], "constraints": {}} for at, score in rungs})
        trial.set_user_attr("paused_at", 0.12)
        for step, score in enumerate(scores, 1):
            trial.report(score, step)
        if ended != "paused":
            current.end(trial, 0.9 if ended == "complete" else ended)
    assert [trial.value for trial in view_of(current)] == [0.3, 0.1, 0.1]
    assert {trial.state for trial in view_of(current)} == {TrialState.COMPLETE}
