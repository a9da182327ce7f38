"""The interval of a mean over runs and rows, against closed forms and against its error rate."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import beta, binomtest, ttest_1samp

from hpo.evaluation.decision import mean_interval


def test_the_interval_of_runs_is_that_of_student() -> None:
    """Many rows that agree add almost nothing."""
    runs = np.array([80.0, 81.0, 83.5])
    expected = ttest_1samp(runs, 0.0).confidence_interval(0.95)
    found = mean_interval(runs, np.full(100_000, runs.mean()), row_bound=1.0)
    assert found == pytest.approx((runs.mean(), expected.low, expected.high), abs=1e-3)


def test_runs_and_rows_add_up_as_squares() -> None:
    rng = np.random.default_rng(1)
    runs = np.array([79.0, 80.0, 81.0])
    rows = rng.normal(0, 3, 400)
    rows += 80.0 - rows.mean()
    mean, low, high = mean_interval(runs, rows, row_bound=0.0)
    width = math.hypot(4.302653 * 1.0 / math.sqrt(3), 1.96 * rows.std(ddof=1) / 20)
    assert (mean, high - mean, mean - low) == pytest.approx((80.0, width, width))


@pytest.mark.parametrize("num_rows", [40, 1000])
def test_rows_that_agree_reach_to_the_exact_bound_on_both_sides(num_rows: int) -> None:
    """Clopper and Pearson: so many rows may all lack a kind of row that this share of new rows is of."""
    share = beta.ppf(0.975, 1, num_rows)
    mean, low, high = mean_interval(np.full(3, 60.0), np.full(num_rows, 60.0), row_bound=100.0)
    assert (mean - low, high - mean) == pytest.approx((100 * share, 100 * share), rel=0.01)


def test_a_row_of_unknown_effect_leaves_no_interval() -> None:
    found = mean_interval(np.array([1.0, 2.0, 3.0]), np.full(50, 2.0), row_bound=math.inf)
    assert found == (2.0, -math.inf, math.inf)


def test_one_run_says_nothing_of_new_runs() -> None:
    assert mean_interval(np.array([2.0]), np.full(50, 2.0), row_bound=1.0) == (2.0, -math.inf, math.inf)


@pytest.mark.parametrize("share", [0.02, 0.3])
def test_the_interval_misses_the_mean_in_at_most_5_of_100_studies(share: float) -> None:
    """Rows are wrong with a probability that a new run changes: few errors are far from a Gaussian."""
    rng, num_studies, missed = np.random.default_rng(5), 400, 0
    for _ in range(num_studies):
        rows_RN = 100.0 * (rng.random((3, 300)) > share)
        rows_RN += rng.normal(0, 1, (3, 1))
        _, low, high = mean_interval(rows_RN.mean(axis=1), rows_RN.mean(axis=0), row_bound=100.0)
        missed += not low <= 100 * (1 - share) <= high
    assert binomtest(missed, num_studies, 0.05, alternative="greater").pvalue > 0.001
