"""Differences and their uncertainty, against scipy's t tests and plain formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from hpo.compare.estimate import (
    Estimate,
    as_scores,
    paired_estimate,
    ratio_estimate,
    tuned_estimate,
    tuned_ratio_estimate,
)

RNG = np.random.default_rng(0)
SCORES = RNG.normal(80, 1, (3, 7))
REFERENCE = RNG.normal(80, 2, (3, 7))


def without_skewness(estimate: Estimate) -> Estimate:
    return Estimate(estimate.difference, estimate.variance, estimate.df, np.zeros_like(estimate.variance))


def test_one_configuration_is_the_paired_t_test() -> None:
    expected = stats.ttest_rel(SCORES[0], REFERENCE[0]).confidence_interval(0.9)
    found = without_skewness(paired_estimate(SCORES[:1] - REFERENCE[:1])).interval(0.05)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_two_sets_of_one_configuration_are_welchs_test() -> None:
    expected = stats.ttest_ind(SCORES[0], REFERENCE[0, :5], equal_var=False).confidence_interval(0.9)
    found = without_skewness(tuned_estimate(SCORES[:1], REFERENCE[:1, :5])).interval(0.05)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("question", ["paired", "tuned"])
def test_several_configurations_against_the_plain_formula(question: str) -> None:
    """Satterthwaite: every configuration has a variance of its own."""
    rows = [SCORES - REFERENCE] if question == "paired" else [SCORES, -REFERENCE]
    parts = [(row.var(ddof=1) / len(row) / 9, len(row) - 1) for row in np.concatenate(rows)]
    variance = sum(part for part, _ in parts)
    found = paired_estimate(rows[0]) if question == "paired" else tuned_estimate(SCORES, REFERENCE)
    assert float(found.difference) == pytest.approx(float((SCORES - REFERENCE).mean()))
    assert float(found.variance) == pytest.approx(variance)
    assert float(found.df) == pytest.approx(variance**2 / sum(part**2 / df for part, df in parts))


def test_the_skewness_of_one_sample_is_scipys() -> None:
    values = RNG.exponential(size=9)
    found = paired_estimate(values[None])
    skewness = float(found.third_cumulant / found.variance**1.5) * 9**0.5
    assert skewness == pytest.approx(stats.skew(values, bias=False))


def test_skewness_moves_the_bound_on_its_side_and_never_narrows() -> None:
    """A tail to the left: the mean is lower than it looks, so the lower bound is Hall's."""
    values = -np.array([[0.1, 0.2, 0.1, 0.3, 0.2, 0.1, 2.0, 0.2]])
    found = paired_estimate(values)
    low, high = (float(bound) for bound in found.interval(0.01))
    plain_low, plain_high = (float(bound) for bound in without_skewness(found).interval(0.01))
    assert low < plain_low
    assert high == plain_high
    mirrored = paired_estimate(-values).interval(0.01)
    np.testing.assert_allclose(mirrored, (-high, -low), rtol=1e-12)
    # Hall's transformation, forwards, of the bound is Student's quantile
    skewness = float(found.third_cumulant / found.variance**1.5)
    t = float((found.difference - low) / found.standard_error)
    transformed = t + skewness * t**2 / 3 + skewness**2 * t**3 / 27 + skewness / 6
    assert transformed == pytest.approx(stats.t.ppf(0.99, 7))


def test_leading_axes_are_kept() -> None:
    found = paired_estimate(np.stack([SCORES, REFERENCE]))
    for index, rows in enumerate((SCORES, REFERENCE)):
        alone = paired_estimate(rows).interval(0.05)
        np.testing.assert_allclose([bound[index] for bound in found.interval(0.05)], alone, rtol=1e-12)


def test_missing_scores_count_for_nothing() -> None:
    holes = np.append(SCORES, np.full((3, 2), np.nan), axis=1)
    np.testing.assert_allclose(paired_estimate(holes).interval(0.05), paired_estimate(SCORES).interval(0.05))


def test_nothing_is_known_of_a_configuration_with_one_score() -> None:
    values = SCORES.copy()
    values[1, 1:] = np.nan
    low, high = paired_estimate(values).interval(0.05)
    assert (float(low), float(high)) == (-math.inf, math.inf)


@pytest.mark.parametrize(("num_configurations", "num", "level"), [(1, 5, 0.04), (1, 8, 0.005), (2, 4, 0.01)])
def test_equal_differences_have_an_interval_of_no_width_when_so_many_are_improbable(
    num_configurations: int, num: int, level: float
) -> None:
    scores = RNG.normal(80, 1, (num_configurations, num))
    differences = scores - (scores + 2)
    for bound in paired_estimate(differences).interval(level):
        assert float(bound) == pytest.approx(-2)
    low, high = paired_estimate(differences[:, :-1]).interval(level)
    assert (float(low), float(high)) == (-math.inf, math.inf)


def test_scores_that_are_missing_are_nan() -> None:
    np.testing.assert_array_equal(as_scores([[1, None, 3], [4, 5]]), [[1, np.nan], [4, 5]])


def test_a_ratio_is_a_geometric_mean() -> None:
    ours, theirs = [[2.0, 8.0, 4.0]], [[1.0, 2.0, 1.5]]
    logs = np.log([2, 4, 4 / 1.5])
    found = ratio_estimate(ours, theirs, 0.05)
    assert found.ratio == pytest.approx(math.exp(logs.mean()))
    expected = stats.ttest_1samp(logs, 0).confidence_interval(0.9)
    assert found.low is not None
    assert found.high is not None
    assert found.low <= math.exp(expected.low) * (1 + 1e-12)
    assert found.high >= math.exp(expected.high) * (1 - 1e-12)
    assert found.num_pairs == 3


def test_a_ratio_of_missing_values() -> None:
    alone = ratio_estimate([[2.0, None], [None, None]], [[1.0, 1.0], [1.0, 1.0]], 0.05)
    assert (alone.ratio, alone.low, alone.high, alone.num_pairs) == (2.0, None, None, 1)
    for estimate in (ratio_estimate, tuned_ratio_estimate):
        with pytest.raises(ValueError, match="needs values on both sides"):
            estimate([[None]], [[1.0]], 0.05)


def test_a_ratio_of_configurations_that_are_not_paired() -> None:
    """Two against one, in other numbers of seeds; a smaller level is a wider interval."""
    ours, theirs = [[2.0, 4.0, 8.0], [4.0, None, 4.0]], [[2.0, 3.0, 2.0]]
    found, wider = (tuned_ratio_estimate(ours, theirs, level) for level in (0.05, 0.01))
    assert found.ratio == pytest.approx(4 / 12 ** (1 / 3))
    assert found.num_pairs == 3
    assert wider.low is not None
    assert found.low is not None
    assert wider.low < found.low < found.ratio
