"""The decision against closed forms; its error rates are in tests/benchmarks/test_verdict_errors.py."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import beta, binomtest

from hpo.evaluation.decision import (
    ALPHA,
    PRIOR,
    collapse_share,
    decide,
    excludable_loss,
    half_width,
    interval,
    mean_bound,
    rows_needed,
)


def test_the_confidence_sequence_has_the_means_with_the_odds_of_its_level() -> None:
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


@pytest.mark.parametrize(("num_lost", "num_rows"), [(0, 50), (0, 1000), (1, 1000), (3, 1000), (40, 400)])
def test_the_bound_of_equal_losses_is_exact(num_lost: int, num_rows: int) -> None:
    """Clopper and Pearson, by scipy."""
    rows = np.zeros(num_rows)
    rows[:num_lost] = -1
    exact = beta.ppf(1 - ALPHA, num_lost + 1, num_rows - num_lost)
    assert -mean_bound(rows, 1.0) == pytest.approx(exact, rel=0.01)


def test_the_bound_of_many_rows_is_that_of_a_gaussian_mean() -> None:
    rows = np.random.default_rng(2).normal(5, 1, 20_000)
    expected = rows.mean() - 1.96 * rows.std() / math.sqrt(len(rows))
    assert mean_bound(rows, 1.0) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("share", [0.002, 0.02])
def test_the_bound_holds_for_skewed_losses(share: float) -> None:
    """Exponential losses in few rows: the bound lies above the true mean in at most 2.5 % of samples."""
    rng, num_samples, mean = np.random.default_rng(3), 400, -0.3 * share
    above = 0
    for _ in range(num_samples):
        losses = np.minimum(rng.exponential(0.3, 300), 1.0) * (rng.random(300) < share)
        above += mean_bound(-losses, 1.0) > mean + 0.3 * share * math.exp(-1 / 0.3)
    assert binomtest(above, num_samples, ALPHA, alternative="greater").pvalue > 0.001


@pytest.mark.parametrize(("num_rows", "bound"), [(40, 100.0), (1000, 100.0), (1000, 2000.0)])
def test_the_loss_that_rows_exclude_is_that_of_rows_that_agree(num_rows: int, bound: float) -> None:
    least = excludable_loss(bound, num_rows)
    assert -mean_bound(np.zeros(num_rows), bound) == pytest.approx(least, rel=0.01)
    assert (1 - least / bound) ** num_rows == pytest.approx(ALPHA)
    assert rows_needed(bound, least * 1.00001) == num_rows


def test_a_loss_in_rows_that_the_split_may_lack_is_not_as_good() -> None:
    """All runs and rows agree, but 300 rows are too few for a margin of half a point."""
    few = decide(np.zeros(50), np.zeros(300), 0.5, row_bound=100.0, step=100 / 300)
    assert (few.verdict, few.low < -0.5 < 0.5 < few.high) == ("not_shown", True)
    assert decide(np.zeros(50), np.zeros(1000), 0.5, row_bound=100.0, step=0.1).verdict == "as_good"
    unknown = decide(np.zeros(50), np.zeros(1000), 0.5, row_bound=math.inf)
    assert (unknown.verdict, unknown.low, unknown.high) == ("not_shown", -math.inf, math.inf)


def test_a_row_beyond_the_bound_sets_the_bound() -> None:
    rows = np.zeros(1000)
    rows[0] = -5000.0
    found = decide(rows[None].mean(axis=1), rows, 0.5, row_bound=100.0)
    assert found.verdict == "not_shown"
    assert -50 < found.low < -5


@pytest.mark.parametrize(("num", "share"), [(3, 0.632), (12, 0.221), (59, 0.0495)])
def test_the_share_of_possible_collapses_is_exact(num: int, share: float) -> None:
    assert collapse_share(num) == pytest.approx(share, abs=0.001)
    assert (1 - collapse_share(num)) ** num == pytest.approx(0.05)
    assert collapse_share(num, 1) > collapse_share(num)
    assert collapse_share(num, num) == 1
