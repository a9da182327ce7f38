"""What the Gaussian process is shown of a study."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
from optuna.trial import TrialState
from support.scripted_study import ScriptedStudy
from support.worker_process import study

from hpo.study.sampling.gp_sampler import PrunedAwareSampler


class Shown(optuna.samplers.RandomSampler):
    """Keeps the study that it is asked for."""

    def infer_relative_search_space(self, study: optuna.Study, trial: Any) -> dict[str, Any]:
        self.study = study
        return super().infer_relative_search_space(study, trial)


def scripted(direction: str = "maximize") -> ScriptedStudy:
    objective = {"metric": "score", "direction": direction}
    return ScriptedStudy(study(12, objective=objective), lambda _: 0.5)


def run_trial(current: ScriptedStudy, evaluations: list[float], ended: Any) -> None:
    trial, _ = current.ask()
    for step, score in enumerate(evaluations, start=1):
        trial.report(score, step)
    current.end(trial, ended)


def ask_gp(current: ScriptedStudy) -> list[optuna.trial.FrozenTrial]:
    """The ended trials as the sampler is shown them."""
    shown = Shown(seed=0)
    current.study.sampler = PrunedAwareSampler(shown)
    current.ask()
    return shown.study.trials[:-1]


@pytest.mark.parametrize(("direction", "sign"), [("maximize", 1.0), ("minimize", -1.0)])
def test_gp_sees_the_best_evaluation_of_pruned_trials(direction: str, sign: float) -> None:
    current = scripted(direction)
    run_trial(current, [sign * 0.1, sign * 0.5], sign * 0.5)
    run_trial(current, [sign * 0.3, sign * 0.2], "pruned")
    run_trial(current, [], "pruned")
    *known, unknown = ask_gp(current)
    assert unknown.state == TrialState.PRUNED, "nothing is known of the last one"
    assert [(trial.state, trial.value) for trial in known] == [
        (TrialState.COMPLETE, sign * 0.5),
        (TrialState.COMPLETE, sign * 0.3),
    ]
    assert current.trials[1].state == TrialState.PRUNED


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
@pytest.mark.parametrize("num_complete", [0, 2])
def test_gp_is_shown_nothing_worse_than_what_cannot_work(direction: str, num_complete: int) -> None:
    sign = 1.0 if direction == "maximize" else -1.0
    current = scripted(direction)
    for number in range(5):
        run_trial(current, [sign * (5.0 - number)], sign * 6.0 if number < num_complete else "pruned")
    run_trial(current, [0.0], "nonfinite")
    *others, infeasible = [trial.values[0] for trial in ask_gp(current)]
    assert infeasible == (min if direction == "maximize" else max)(others)


def test_gp_sees_every_trial_as_of_its_first_rung() -> None:
    """Also trials that wait at a later rung or are complete. A trial that broke later is infeasible."""
    current = scripted()
    at_rungs = [(0.3, 0.7), (0.2, 0.8), (0.1,)]
    for scores, ended in zip(at_rungs, ["complete", "nonfinite", "paused"], strict=True):
        trial, _ = current.ask()
        rungs = dict(zip(("0.04", "0.12"), scores, strict=False))
        trial.set_user_attr(
            "rungs", {at: {"values": [score], "constraints": {}} for at, score in rungs.items()}
        )
        trial.set_user_attr("paused_at", 0.12)
        for step, score in enumerate(scores, 1):
            trial.report(score, step)
        if ended != "paused":
            current.end(trial, 0.9 if ended == "complete" else ended)
    assert [trial.value for trial in ask_gp(current)] == [0.3, 0.1, 0.1]
    assert {trial.state for trial in ask_gp(current)[:3]} == {TrialState.COMPLETE}
