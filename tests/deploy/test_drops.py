from __future__ import annotations

import math

import pytest

from hpo.config.objective import ObjectiveConfig
from hpo.deploy.drops import Scale, verdict_on
from hpo.deploy.net_loss import TextChanges
from hpo.evaluation.intervals import Interval
from hpo.non_inferiority import decide

ENOUGH = TextChanges(0, 0, 10_000)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.5, 0.5, "as_good"),
        (-1.5, 0.5, "undecided"),
        (-3.0, -1.5, "worse"),
        (-0.9, -0.1, "as_good"),
        (0.5, 2.0, "as_good"),
        (-math.inf, math.inf, "undecided"),
        (math.nan, math.nan, "undecided"),
    ],
)
def test_an_interval_decides_by_the_margin(low: float, high: float, verdict: str) -> None:
    assert decide(low, high, 1.0) == verdict
    if math.isfinite(low):
        assert verdict_on(Interval(-(low + high) / 2, -high, -low), ENOUGH, 1.0, "points")[0] == verdict


def test_the_exact_bound_is_a_floor() -> None:
    alike = Interval(0.0, 0.0, 0.0)
    assert verdict_on(alike, TextChanges(0, 0, 437), 1.0, "points") == ("as_good", "")
    verdict, reason = verdict_on(alike, TextChanges(0, 0, 436), 1.0, "points")
    assert verdict == "undecided"
    assert reason.endswith("--max-drop is 1: it takes 437 rows at least.")
    assert verdict_on(alike, TextChanges(9, 9, 1000), 1.0, "points")[1] == (
        "9 of 1,000 texts get worse and 9 better, so of all texts up to 1.8 % net can (exact, 97.5 %), and "
        "--max-drop is 1."
    )


def test_no_verdict_goes_against_the_drop_that_was_measured() -> None:
    assert verdict_on(Interval(1.5, -0.2, 0.8), ENOUGH, 1.0, "points") == (
        "undecided",
        "the drop of +1.50 [-0.20, +0.80] points may be beyond --max-drop 1; 1.6 would allow it.",
    )
    assert verdict_on(Interval(1.5, -0.2, 0.8), ENOUGH, 1.6, "points") == ("as_good", "")
    assert verdict_on(Interval(0.5, 1.2, 1.8), ENOUGH, 1.0, "points")[0] == "undecided"
    assert verdict_on(Interval(1.5, 1.2, 1.8), ENOUGH, 1.0, "points")[0] == "worse"


def test_a_drop_without_an_interval_is_undecided() -> None:
    assert verdict_on(Interval(0.0, None, None), ENOUGH, 1.0, "points") == (
        "undecided",
        "the drop of +0.00 points has no interval: too few rows have labels.",
    )


@pytest.mark.parametrize(
    ("objective", "unit", "smaller"),
    [
        (ObjectiveConfig(), "points", False),
        (ObjectiveConfig(metric="size/mae", direction="minimize"), "label units", True),
    ],
)
def test_the_unit_is_that_of_the_objective(objective: ObjectiveConfig, unit: str, smaller: bool) -> None:
    scale = Scale.of(objective, 1.0)
    assert (scale.unit, scale.smaller_is_better) == (unit, smaller)
