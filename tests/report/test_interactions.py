"""Partial dependence on a setting under each precision, with an interaction that is planted or absent."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
from study_records import fake_trial, tables_of

from hpo.report.figures import Chart
from hpo.report.interactions import MIN_TRIALS, _h_squared, interactions

RATES = (1e-5, 1e-4, 1e-3)


def chart(value: Callable[[str, float], float], repeats: int = 4) -> Chart:
    """Of the learning rate, where a trial has the value of its precision and rate."""
    cases = [(name, rate) for name in ("fp32", "bf16") for rate in RATES for _ in range(repeats)]
    trials = []
    for number, (name, rate) in enumerate(cases):
        trial = dataclasses.replace(fake_trial(number, name), values=(value(name, rate),))
        trial.params["learning_rate"] = rate
        trials.append(trial)
    return next(one for one in interactions(tables_of(trials)) if one.key == "interaction_learning_rate")


def best_rates(drawn: Chart) -> dict[str, float]:
    return {one.name: one.x[int(np.argmax(one.y))] for one in drawn.series if one.in_legend}


def test_each_precision_needs_a_rate_of_its_own() -> None:
    best = {"fp32": 1e-3, "bf16": 1e-5}
    drawn = chart(lambda name, rate: 1.0 - 0.2 * abs(math.log10(rate / best[name])))
    assert best_rates(drawn) == best
    assert drawn.x_log


def test_no_interaction() -> None:
    drawn = chart(lambda name, rate: 0.5 + 0.1 * (name == "bf16") + 0.1 * math.log10(rate))
    assert best_rates(drawn) == {"fp32": 1e-3, "bf16": 1e-3}


def test_too_few_trials() -> None:
    assert chart(lambda *_: 0.5, repeats=1).absent.startswith(f"This needs {MIN_TRIALS} complete trials")


@pytest.mark.parametrize(
    ("joint", "share"),
    [([[0.0, 1.0], [1.0, 2.0]], 0.0), ([[0.0, 1.0], [1.0, 0.0]], 1.0), ([[3.0, 3.0], [3.0, 3.0]], 0.0)],
)
def test_share_of_the_interaction(joint: list[list[float]], share: float) -> None:
    assert _h_squared(np.array(joint)) == pytest.approx(share)
