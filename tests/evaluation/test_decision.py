"""The decision against closed forms; its error rates are in tests/benchmarks/test_verdict_errors.py."""

import math
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import beta, binomtest, t

from hpo.evaluation.decision import (
    ALPHA,
    COVERED,
    PRIOR,
    _probability_below,
    common_bound,
    decide,
    excludable_loss,
    groups_needed,
    half_width,
    mean_bound,
    mean_interval,
    possible_share,
    runs_needed,
)


def test_confidence_sequence_ends_at_the_odds_of_its_level() -> None:
    values = np.random.default_rng(0).normal(0, 1, 9)
    num, width = len(values), half_width(values)
    t2 = (width / (values.std(ddof=1) / math.sqrt(num))) ** 2
    mixed = 1 + num * PRIOR
    odds = mixed**-0.5 * ((1 + t2 / (num - 1)) / (1 + t2 / ((num - 1) * mixed))) ** (num / 2)
    assert odds == pytest.approx(1 / (2 * ALPHA))


NO_ROWS = {"bounds_G": np.zeros(9)}
"""Rows that hide nothing, so that the runs decide."""


def decided(runs: Any, margin: float = 0.5) -> Any:
    return decide(np.asarray(runs, float), np.full(9, np.mean(runs)), margin, **NO_ROWS)


def test_equal_runs_reach_as_far_as_a_bet_of_all_capital() -> None:
    """A bet of all capital on no loss wins 4/3 for each run, since a run may lose 4 margins."""
    stakes, shares = np.array([0.25, 0.5, 0.75, 1.0]), np.array([1, 1, 1, 3]) / 6
    for num in (9, 15, 36):
        low = decided(np.zeros(num)).low
        capital = shares @ (1 + stakes * (COVERED * 0.5 / (COVERED * 0.5 + low) - 1)) ** num
        assert capital == pytest.approx(1 / ALPHA, rel=1e-4)
    assert runs_needed() == 15
    assert [decided(np.zeros(num)).verdict for num in (14, 15)] == ["not_shown", "as_good"]


@pytest.mark.parametrize("draw", ["two points", "lognormal", "gaussian"])
def test_the_mean_of_runs_is_rarely_called_as_good_at_the_margin(draw: str) -> None:
    """The true mean is the margin, at any of five looks; no loss is larger than 4 margins."""
    rng, wrong = np.random.default_rng(5), 0
    for _ in range(100):
        if draw == "two points":
            losses = 2.0 * (rng.random(36) < 0.25)
        elif draw == "lognormal":
            losses = np.minimum(rng.lognormal(-1.05, 1.0, 36), 2.0)  # its mean is 0.50
        else:
            losses = np.minimum(rng.normal(0.5, 0.3, 36), 2.0)
        wrong += any(decided(-losses[:num]).verdict == "as_good" for num in (9, 12, 18, 27, 36))
    assert binomtest(wrong, 100, ALPHA, alternative="greater").pvalue > 0.01


def test_slack_is_the_distance_of_interval_and_margin() -> None:
    found = decided(np.zeros(36))
    assert found.slack == pytest.approx(0.5 + found.low)
    worse = decided(np.full(36, -2.0))
    assert (worse.verdict, worse.slack) == ("worse", pytest.approx(-0.5 - worse.high))
    assert math.isinf(decided(np.zeros(1)).slack), "one run on each side: these two models"


def test_a_seen_large_loss_widens_the_interval() -> None:
    """It counts in full, not as 4 margins."""
    runs = np.zeros(36)
    runs[5] = -20.0
    found = decided(runs, margin=1.0)
    assert (found.difference, found.verdict) == (pytest.approx(-20 / 36), "not_shown")
    assert found.difference - found.low >= half_width(runs)


def test_widths_of_groups_and_runs_add_up_as_squares() -> None:
    rng = np.random.default_rng(1)
    runs, rows = rng.normal(0, 1, 12), rng.normal(0, 3, 400)
    found = decide(runs, rows + runs.mean() - rows.mean(), 10.0, bounds_G=np.zeros(400))
    of_runs = runs.mean() - decide(runs, np.full(400, runs.mean()), 10.0, bounds_G=np.zeros(400)).low
    assert found.difference - found.low == pytest.approx(
        math.hypot(of_runs, t.ppf(0.975, 399) * rows.std(ddof=1) / 20)
    )


@pytest.mark.parametrize(("runs", "rows", "is_known"), [(3, 1, False), (1, 2, True)])
def test_one_row_excludes_nothing(runs: int, rows: int, is_known: bool) -> None:
    """One run on each side asks about these two models alone."""
    found = decide(np.arange(float(runs)), np.arange(float(rows)), 0.5, bounds_G=np.ones(rows))
    assert math.isfinite(found.high - found.low) == is_known


def test_common_bound_hides_the_largest_loss_of_uneven_groups() -> None:
    """By a search for the largest loss that a sample lacks with a probability of 2.5 %."""
    bounds = np.random.default_rng(0).geometric(0.3, 60).astype(float)

    def unseen(level: float) -> float:
        return float(np.log(np.minimum(1, level / bounds)).sum()) - math.log(ALPHA)

    level = brentq(unseen, 1e-6, bounds.max())
    hidden = float(np.maximum(bounds - level, 0).sum()) / 60
    assert excludable_loss(common_bound(bounds), 60) == pytest.approx(hidden)
    assert common_bound(np.full(70, 3.0)) == pytest.approx(3.0)
    assert common_bound(np.array([100.0, *[1.0] * 99])) < 50
    assert math.isinf(common_bound(np.array([1.0, math.inf])))


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
    assert groups_needed(bound, least * 1.00001) == num_rows
    assert groups_needed(bound, bound) == 1


def test_few_equal_rows_are_not_as_good() -> None:
    """All runs and rows agree, but 300 rows are too few for a margin of half a point."""
    few = decide(np.zeros(50), np.zeros(300), 0.5, bounds_G=np.full(300, 100.0))
    assert (few.verdict, few.low < -0.5 < 0.5 < few.high) == ("not_shown", True)
    assert decide(np.zeros(50), np.zeros(1000), 0.5, bounds_G=np.full(1000, 100.0)).verdict == "as_good"
    unknown = decide(np.zeros(50), np.zeros(1000), 0.5, bounds_G=np.full(1000, math.inf))
    assert (unknown.verdict, unknown.low, unknown.high) == ("not_shown", -math.inf, math.inf)


def test_a_row_beyond_the_bound_sets_the_bound() -> None:
    rows = np.zeros(1000)
    rows[0] = -5000.0
    found = decide(rows[None].mean(axis=1), rows, 0.5, bounds_G=np.full(1000, 100.0))
    assert found.verdict == "not_shown"
    assert -50 < found.low < -5


@pytest.mark.parametrize(("num", "share"), [(3, 0.632), (12, 0.221), (59, 0.0495)])
def test_possible_share_of_runs_is_exact(num: int, share: float) -> None:
    assert possible_share(num) == pytest.approx(share, abs=0.001)
    assert (1 - possible_share(num)) ** num == pytest.approx(0.05)
    assert possible_share(num, 1) > possible_share(num)
    assert possible_share(num, num) == 1


# The interval of a mean


def test_mean_interval_adds_runs_and_rows_as_squares() -> None:
    rng = np.random.default_rng(1)
    runs, rows = np.array([79.0, 80.0, 81.0]), rng.normal(0, 3, 400)
    rows += 80.0 - rows.mean()
    mean, low, high = mean_interval(runs, rows, bounds_G=np.zeros(400))
    width = math.hypot(4.302653 * 1.0 / math.sqrt(3), t.ppf(0.975, 399) * rows.std(ddof=1) / 20)
    assert (mean, high - mean, mean - low) == pytest.approx((80.0, width, width))


@pytest.mark.parametrize("num_rows", [40, 1000])
def test_mean_interval_of_equal_rows_reaches_the_exact_bounds(num_rows: int) -> None:
    """Clopper and Pearson: this share of new rows may be of a kind that the sample lacks."""
    share = beta.ppf(0.975, 1, num_rows)
    mean, low, high = mean_interval(
        np.full(3, 60.0), np.full(num_rows, 60.0), bounds_G=np.full(num_rows, 100.0)
    )
    assert (mean - low, high - mean) == pytest.approx((100 * share, 100 * share), rel=0.01)


@pytest.mark.parametrize(("runs", "bound"), [([1.0, 2.0, 3.0], math.inf), ([2.0], 1.0)])
def test_mean_interval_is_unknown_for_one_run_or_an_unknown_bound(runs: list[float], bound: float) -> None:
    found = mean_interval(np.array(runs), np.full(50, 2.0), bounds_G=np.full(50, bound))
    assert found == (2.0, -math.inf, math.inf)
