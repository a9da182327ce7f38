"""Blame of choices for infeasible trials."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState
from support.scripted_study import ScriptedStudy
from support.worker_process import study

from hpo.outcome import Outcome
from hpo.study.sampling.feasible_sampler import MIN_INFEASIBLE_TRIALS, Failures

FP16 = ("fp_precision", "fp16")
CHOICES = {
    "fp_precision": CategoricalDistribution(("fp32", "bf16", "fp16")),
    "batch_size": CategoricalDistribution((8, 16, 32)),
    "encoder": CategoricalDistribution(("a", "b")),
}
AT_RUNG = {"0.04": {"values": [0.5], "constraints": {}}}
HEALS = {"finite_in_fp32": True, "precision": {"effective": "fp16"}}


def trial(outcome: str, *rungs: float, telemetry: dict[str, Any] | None = None, **params: Any) -> FrozenTrial:
    """A trial that has reached these rungs; a `paused` one has not ended."""
    params = {"fp_precision": "fp16", "batch_size": 8, **params}
    is_paused = outcome == "paused"
    state = TrialState.RUNNING if is_paused else TrialState[Outcome(outcome).optuna_state]
    return optuna.trial.create_trial(
        state=state,
        value=0.5 if state == TrialState.COMPLETE else None,
        params=params,
        distributions={name: CHOICES[name] for name in params},
        user_attrs={
            "outcome": outcome,
            "telemetry": telemetry or {},
            "rungs": {str(rung): {"values": [0.5], "constraints": {}} for rung in rungs},
            "paused_at": max(rungs, default=0.0),
        },
        system_attrs={} if is_paused or not Outcome(outcome).infeasible else {"constraints:feasible": 1.0},
    )


def blamed(*trials: FrozenTrial) -> set[tuple[str, Any]]:
    failures = Failures()
    for one in trials:
        if one.state.is_finished():
            failures.add_ended(one)
    return failures.blamed([one for one in trials if not one.state.is_finished()])


@pytest.mark.parametrize("rungs", [(), (0.04,), (0.04, 0.12, 0.36)])
def test_one_failure_suffices_if_the_step_is_finite_in_fp32(rungs: tuple[float, ...]) -> None:
    paused = [trial("paused", *rungs) for _ in range(5) if rungs]
    failed = trial("nonfinite", *rungs, telemetry=HEALS)
    assert blamed(*paused) == set()
    assert blamed(*paused, failed) == {FP16}


@pytest.mark.parametrize("outcome", ["paused", "pruned"])
def test_only_a_complete_trial_clears_a_precision(outcome: str) -> None:
    """Without a repeat in fp32, three failures are needed."""
    failed = [trial("nonfinite", 0.04) for _ in range(MIN_INFEASIBLE_TRIALS)]
    others = [trial(outcome, 0.04) for _ in range(5)]
    assert blamed(*failed, *others) == {FP16}
    assert blamed(*failed[1:], *others) == set()
    for telemetry in (HEALS, {}):
        again = trial("nonfinite", 0.04, telemetry=telemetry)
        assert blamed(*failed, again, trial("complete")) == set()


@pytest.mark.parametrize(
    ("outcome", "telemetry", "is_blamed"),
    [
        ("nonfinite", {"precision": {"effective": "fp16"}}, True),
        ("nonfinite", {"precision": {"effective": "fp32"}}, False),
        ("nonfinite", {"precision": {"effective": "fp16"}, "finite_in_fp32": False}, False),
        ("incompatible", {"compatibility": {"verdict": "incompatible"}}, True),
        ("incompatible", {"precision": {"effective": "fp16"}}, False),  # a model that cannot be built
        ("failed", {}, False),
    ],
)
def test_a_precision_is_blamed_only_if_it_may_be_the_cause(
    outcome: str, telemetry: dict[str, Any], is_blamed: bool
) -> None:
    """Otherwise the batch size of all these trials is."""
    failed = [trial(outcome, telemetry=telemetry, batch_size=32) for _ in range(5)]
    other = [("batch_size", 32)] if outcome != "failed" else []
    assert blamed(*failed) == ({FP16} if is_blamed else {*other})


def test_one_failure_before_the_progress_of_other_trials_does_not_suffice() -> None:
    """A high learning rate breaks fp16 early in one trial, while others train on."""
    early, late = (trial("nonfinite", *rungs, telemetry=HEALS) for rungs in [(), (0.04, 0.12)])
    others = [trial("paused", 0.04), trial("paused", 0.04, 0.12)]
    assert blamed(early, *others) == set()
    assert blamed(early, late, *others) == {FP16}


@pytest.mark.parametrize("outcome", ["incompatible", "oom", "unsupported", "crashed"])
def test_a_paused_trial_clears_its_choices_of_early_failures(outcome: str) -> None:
    failed = [trial(outcome) for _ in range(5)]
    assert blamed(*failed) >= {FP16}
    assert blamed(*failed, trial("paused", 0.04)) == set()


@pytest.mark.parametrize("name", ["tpe", "nsga2"])
@pytest.mark.parametrize("outcome", ["complete", "paused"])
def test_a_precision_without_a_complete_trial_gets_a_tenth_of_the_starts(name: str, outcome: str) -> None:
    """It may still break. Before any trial is complete, nothing is known."""
    current = ScriptedStudy(study(100, sampler={"name": name, "seed": 1}))

    def start(**given: Any) -> str:
        if given:
            current.study.enqueue_trial(given)
        started, params = current.ask()
        started.set_user_attr("rungs", AT_RUNG)
        if params["fp_precision"] == "fp32" and outcome == "complete":
            current.end(started, 0.5)
        return str(params["fp_precision"])

    for precision in ("fp32", "bf16", "fp16"):
        start(fp_precision=precision)
    drawn = [start() for _ in range(47)]
    for precision in ("bf16", "fp16"):
        assert (drawn.count(precision) <= 4) == (outcome == "complete")
