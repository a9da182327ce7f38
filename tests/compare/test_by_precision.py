"""Numeric telemetry of the compared trials."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from study_records import fake_numerics, fake_trial

from hpo.compare.by_precision import by_precision
from hpo.config.comparison import Arm, ComparedConfiguration
from hpo.study.study_record import TrialRecord


def measured(underflow: float, *skipped: int) -> TrialRecord:
    """An evaluation for each count of skipped steps; only the last has the underflow."""
    trial = fake_trial(0, "fp16")
    rows = [{**fake_numerics(index, 0.0, 0.5), "skipped_steps": num} for index, num in enumerate(skipped)]
    if rows:
        rows[-1]["all"] = {**rows[-1]["all"], "underflow": underflow}
    evaluations = [replace(trial.evaluations[0], numerics=row) for row in rows]
    return replace(trial, evaluations=evaluations)


def of_trials(trials: list[list[TrialRecord]], paired: tuple[bool, ...]) -> Any:
    """What `by_precision` reads of a comparison of fp16 alone, [configuration][seed]."""
    configurations = tuple(
        ComparedConfiguration(trial=number, params={}, precisions=("fp16",), paired=is_paired)
        for number, is_paired in enumerate(paired)
    )
    arms = [Arm(configuration=number, precision="fp16") for number in range(len(paired))]
    plan = SimpleNamespace(
        precisions=("fp16",),
        configurations=configurations,
        arms=lambda: arms,
        seeds_of=lambda arm: len(trials[arm.configuration]),
    )
    scores: Any = SimpleNamespace(plan=plan, trial=lambda arm, index: trials[arm.configuration][index])
    (found,) = by_precision(scores)
    return found


def test_medians_of_the_last_evaluations_and_the_skipped_steps_of_all() -> None:
    found = of_trials([[measured(0.1, 2, 1), measured(0.3, 0, 5), measured(0.2, 4), measured(0.9)]], (True,))
    assert found.numerics.num_trials == 3, "one was never evaluated"
    assert (found.numerics.underflow, found.numerics.updates_lost) == (0.2, 0.5)
    assert found.numerics.overflow == 0.0
    assert found.numerics.skipped_steps == 4
    assert found.num_trials == 4


def test_settings_that_are_not_shared_do_not_count() -> None:
    trials = [[measured(0.1, 0)], [measured(0.7, 0)]]
    assert of_trials(trials, (True, False)).numerics.underflow == 0.1
    assert of_trials(trials, (False, False)).numerics.underflow == pytest.approx(0.4)
    assert of_trials([[measured(0.0)]], (True,)).numerics.underflow is None
