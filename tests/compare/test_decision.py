"""The decision against closed forms; its errors are in tests/benchmarks/test_decision_errors.py."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import optimize

from hpo.compare.decision import (
    ALPHA,
    PRIOR,
    betting_floor,
    collapse_share,
    decide,
    half_width,
    interval,
)


def test_the_confidence_sequence_has_the_means_that_the_odds_leave() -> None:
    """The odds of the mixture, at the end of the interval, are those of the level."""
    values = np.random.default_rng(0).normal(0, 1, 9)
    num, width = len(values), half_width(values)
    t2 = (width / (values.std(ddof=1) / math.sqrt(num))) ** 2
    mixed = 1 + num * PRIOR
    odds = mixed**-0.5 * ((1 + t2 / (num - 1)) / (1 + t2 / ((num - 1) * mixed))) ** (num / 2)
    assert odds == pytest.approx(1 / (2 * ALPHA))


@pytest.mark.parametrize("num", [1, 2, 3])
def test_few_runs_leave_any_mean(num: int) -> None:
    assert half_width(np.arange(num, dtype=float)) == math.inf


def test_runs_that_agree_differ_by_less_than_a_step() -> None:
    assert half_width(np.zeros(8)) == 0
    assert 0 < half_width(np.zeros(8), step=0.5) < 0.5


def test_rows_and_runs_add_up() -> None:
    rng = np.random.default_rng(1)
    runs, rows = rng.normal(0, 1, 12), rng.normal(0, 3, 400)
    low, high = interval(runs, rows)
    expected = math.hypot(float(half_width(runs)), 1.96 * rows.std(ddof=1) / 20)
    assert (high - low) / 2 == pytest.approx(expected)
    assert (high + low) / 2 == pytest.approx(runs.mean())


@pytest.mark.parametrize("num_rows", [300, 1000, 5000])
def test_rows_that_agree_have_the_floor_of_the_largest_bet(num_rows: int) -> None:
    """A loss in a share of the texts that so many rows may lack whole."""
    floor = -float(betting_floor(np.zeros(num_rows)))
    alone = math.log(2 / ALPHA) / num_rows
    assert 0.9 * alone < floor < 1.1 * alone

    def log_capital(loss: float) -> float:
        return math.log(0.5) + num_rows * math.log1p(loss) + math.log(ALPHA)

    assert floor <= optimize.brentq(log_capital, 1e-9, 1) + 1e-5


def test_a_loss_that_lies_in_rows_the_split_may_lack_is_not_as_good() -> None:
    """All runs and rows agree, but 300 rows are too few to say so of a margin of half a point."""
    found = decide(np.zeros(50), np.zeros(300), 0.5, row_bound=100.0, step=100 / 300)
    assert (found.sign, found.high < 0.5) == (0, True)
    assert decide(np.zeros(50), np.zeros(1000), 0.5, row_bound=100.0, step=0.1).sign == 1
    assert decide(np.zeros(50), np.zeros(300), 0.5).sign == 1, "where nobody knows what a row can lose"


@pytest.mark.parametrize(("num", "share"), [(3, 0.632), (12, 0.221), (59, 0.0495)])
def test_the_share_that_may_collapse_is_exact(num: int, share: float) -> None:
    assert collapse_share(num) == pytest.approx(share, abs=0.001)
    assert (1 - collapse_share(num)) ** num == pytest.approx(0.05)
    assert collapse_share(num, 1) > collapse_share(num)
    assert collapse_share(num, num) == 1
