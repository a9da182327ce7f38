"""The decision against closed forms; its error rates are in tests/benchmarks/test_verdict_errors.py."""

import math

import numpy as np
import pytest
from scipy.stats import beta

from hpo.evaluation.decision import (
    ALPHA,
    PRIOR,
    _probability_below,
    collapse_share,
    decide,
    excludable_loss,
    half_width,
    interval,
    mean_bound,
    mean_interval,
    rows_needed,
)


def test_confidence_sequence_ends_at_the_odds_of_its_level() -> None:
    values = np.random.default_rng(0).normal(0, 1, 9)
    num, width = len(values), half_width(values)
    t2 = (width / (values.std(ddof=1) / math.sqrt(num))) ** 2
    mixed = 1 + num * PRIOR
    odds = mixed**-0.5 * ((1 + t2 / (num - 1)) / (1 + t2 / ((num - 1) * mixed))) ** (num / 2)
    assert odds == pytest.approx(1 / (2 * ALPHA))


def test_equal_runs_may_differ_by_less_than_a_step() -> None:
    assert half_width(np.zeros(8)) == 0
    assert 0 < half_width(np.zeros(8), step=0.5) < 0.5


def test_variances_of_rows_and_runs_add_up() -> None:
    rng = np.random.default_rng(1)
    runs, rows = rng.normal(0, 1, 12), rng.normal(0, 3, 400)
    low, high = interval(runs, rows)
    expected = math.hypot(float(half_width(runs)), 1.96 * rows.std(ddof=1) / 20)
    assert (high - low) / 2 == pytest.approx(expected)
    assert (high + low) / 2 == pytest.approx(runs.mean())


@pytest.mark.parametrize(("runs", "rows", "is_known"), [(3, 1, False), (2, 9, False), (1, 2, True)])
def test_one_row_or_two_runs_exclude_nothing(runs: int, rows: int, is_known: bool) -> None:
    """One run on each side asks about these two models alone."""
    low, high = interval(np.arange(float(runs)), np.arange(float(rows)))
    assert math.isfinite(high - low) == is_known


def test_probability_is_continuous_at_the_mean() -> None:
    """At the mean of the values the saddlepoint formula is 0 / 0."""
    values, counts = np.array([0.0, 0.1, 1.0]), np.array([3, 5, 2])
    mean = float((values * counts).sum() / counts.sum())
    left, right = (_probability_below(mean + shift, values, counts) for shift in (-1e-3, 1e-3))
    assert _probability_below(mean, values, counts) == pytest.approx((left + right) / 2, abs=1e-4)


@pytest.mark.parametrize(("num_lost", "num_rows"), [(0, 50), (0, 1000), (1, 1000), (3, 1000), (40, 400)])
def test_bound_of_equal_losses_is_exact(num_lost: int, num_rows: int) -> None:
    """Clopper and Pearson, by scipy."""
    rows = np.zeros(num_rows)
    rows[:num_lost] = -1
    exact = beta.ppf(1 - ALPHA, num_lost + 1, num_rows - num_lost)
    assert -mean_bound(rows, 1.0) == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize(("num_rows", "bound"), [(40, 100.0), (1000, 100.0), (1000, 2000.0)])
def test_excludable_loss_is_the_bound_of_equal_rows(num_rows: int, bound: float) -> None:
    least = excludable_loss(bound, num_rows)
    assert -mean_bound(np.zeros(num_rows), bound) == pytest.approx(least, rel=0.01)
    assert (1 - least / bound) ** num_rows == pytest.approx(ALPHA)
    assert rows_needed(bound, least * 1.00001) == num_rows
    assert rows_needed(bound, bound) == 1


def test_few_equal_rows_are_not_as_good() -> None:
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
def test_share_of_possible_collapses_is_exact(num: int, share: float) -> None:
    assert collapse_share(num) == pytest.approx(share, abs=0.001)
    assert (1 - collapse_share(num)) ** num == pytest.approx(0.05)
    assert collapse_share(num, 1) > collapse_share(num)
    assert collapse_share(num, num) == 1


# The interval of a mean


def test_mean_interval_adds_runs_and_rows_as_squares() -> None:
    rng = np.random.default_rng(1)
    runs, rows = np.array([79.0, 80.0, 81.0]), rng.normal(0, 3, 400)
    rows += 80.0 - rows.mean()
    mean, low, high = mean_interval(runs, rows, row_bound=0.0)
    width = math.hypot(4.302653 * 1.0 / math.sqrt(3), 1.96 * rows.std(ddof=1) / 20)
    assert (mean, high - mean, mean - low) == pytest.approx((80.0, width, width))


@pytest.mark.parametrize("num_rows", [40, 1000])
def test_mean_interval_of_equal_rows_reaches_the_exact_bounds(num_rows: int) -> None:
    """Clopper and Pearson: this share of new rows may be of a kind that the sample lacks."""
    share = beta.ppf(0.975, 1, num_rows)
    mean, low, high = mean_interval(np.full(3, 60.0), np.full(num_rows, 60.0), row_bound=100.0)
    assert (mean - low, high - mean) == pytest.approx((100 * share, 100 * share), rel=0.01)


@pytest.mark.parametrize(("runs", "bound"), [([1.0, 2.0, 3.0], math.inf), ([2.0], 1.0)])
def test_mean_interval_is_unknown_for_one_run_or_an_unknown_bound(runs: list[float], bound: float) -> None:
    found = mean_interval(np.array(runs), np.full(50, 2.0), row_bound=bound)
    assert found == (2.0, -math.inf, math.inf)
