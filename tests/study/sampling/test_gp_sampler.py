"""The Gaussian process's view of a study, and samplers under limits that rule out the best values."""

import math
from typing import Any

import optuna
import pytest
from optuna.samplers import RandomSampler
from optuna.trial import TrialState
from support.scripted_study import Params, ScriptedStudy
from support.worker_process import study

from hpo.config.limits import violation
from hpo.study.sampling.gp_sampler import PrunedAwareSampler
from hpo.study.sampling.samplers import build_sampler


def scripted(direction: str = "maximize") -> ScriptedStudy:
    objective = {"metric": "score", "direction": direction}
    return ScriptedStudy(study(12, objective=objective), lambda _: 0.5)


def run_trial(current: ScriptedStudy, evaluations: list[float], ended: Any) -> None:
    trial, _ = current.ask()
    for step, score in enumerate(evaluations, start=1):
        trial.report(score, step)
    current.end(trial, ended)


def view_of(current: ScriptedStudy) -> list[optuna.trial.FrozenTrial]:
    return PrunedAwareSampler(RandomSampler(seed=0)).view(current.study).trials


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


def test_an_infeasible_trial_has_the_worst_value_of_each_objective() -> None:
    objective = [{"metric": "score"}, {"metric": "peak_memory_bytes", "direction": "minimize"}]
    current = ScriptedStudy(study(12, objective=objective))
    run_trial(current, [], "nonfinite")
    assert [trial.values for trial in view_of(current)] == [[0.0, 0.0]], "nothing else is known"
    for ended in ((0.5, 3.0), (0.7, 2.0), "pruned"):
        run_trial(current, [], ended)
    assert [trial.values for trial in view_of(current)] == [[0.5, 3.0], [0.5, 3.0], [0.7, 2.0], None]


LIMITS = {"peak_memory_bytes": {"max": 8e9}, "evaluation_examples_per_second": {"min": 500}}


def position(params: Params) -> float:
    """Position from 0 to 1 in the range of learning rates."""
    return math.log10(params["learning_rate"]) / 2 + 2.5


def score(params: Params) -> float:
    """Best at 0.85 in fp32, by far; another hill at 0.2."""
    far, near = (math.exp(-(((position(params) - at) / 0.15) ** 2)) for at in (0.85, 0.2))
    return far + 0.6 * near + 0.1 * (params["fp_precision"] == "fp32")


def measured(params: Params) -> dict[str, Any]:
    """Two fifths of the rates fit, and fp32 is too slow: a configuration in four meets both limits."""
    speed = 250 if params["fp_precision"] == "fp32" else 750
    return {"peak_memory_bytes": 20e9 * position(params), "evaluation_examples_per_second": speed}


@pytest.mark.parametrize(
    ("name", "n_trials", "options"),
    [("tpe", 60, {}), ("gp", 20, {}), ("nsga2", 120, {"population_size": 12})],
)
def test_learning_samplers_move_within_the_limits(name: str, n_trials: int, options: dict[str, Any]) -> None:
    config = study(n_trials, sampler={"name": name, "seed": 1, **options}, constraints=LIMITS)
    current = ScriptedStudy(config, score, measured=measured)
    current.run(n_trials)
    later = current.trials[n_trials // 3 :]
    assert sum(not violation(trial.constraints) for trial in later) > 0.6 * len(later)
    best = current.study.best_trial  # Optuna's own, by the constraints
    assert violation(best.constraints) == 0
    assert best.value == pytest.approx(0.6, abs=0.01)
    assert best.value < max(trial.value or 0.0 for trial in current.trials)


def test_the_gp_view_has_all_limits_of_every_trial() -> None:
    """An infeasible trial has the violations of others, an early ended one the worst value."""
    ends = {"fp16": "nonfinite", "bf16": "pruned", "fp32": 0.5}
    config = study(3, sampler={"name": "random"}, constraints=LIMITS)
    current = ScriptedStudy(config, lambda params: ends[params["fp_precision"]], measured=measured)
    for precision, rate in [("fp32", 1e-5), ("fp16", 1e-5), ("bf16", 1e-3), ("bf16", 1e-5)]:
        current.run(fp_precision=precision, learning_rate=rate, batch_size=8)
    sampler: Any = build_sampler(study(4, sampler={"name": "gp"}).sampler, config.search_space)
    shown = PrunedAwareSampler(RandomSampler(seed=0)).view(sampler.view(current.study)).get_trials()
    assert [trial.values for trial in shown] == [[0.5], [0.5], [0.5], None]
    memory, speed = "peak_memory_bytes", "evaluation_examples_per_second"
    violated = [{name: round(value, 9) for name, value in trial.constraints.items()} for trial in shown[:3]]
    assert violated == [{memory: -1.0, speed: 0.5}, {memory: 1.5, speed: 0.5}, {memory: 1.5, speed: -0.5}]
