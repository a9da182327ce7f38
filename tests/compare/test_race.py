"""Races on planted configurations; the posterior against closed forms and a plain one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate, stats

from hpo.compare.race import Race, Standing, probabilities_best, run_race
from hpo.compare.sequential import Plan

PLAN = Plan()


def planted(
    means: dict[int, float], noise: float = 0.3, num_seeds: int = 20
) -> dict[int, list[float | None]]:
    rng = np.random.default_rng(0)
    seeds = rng.normal(0, 2, num_seeds)
    return {
        key: (mean + seeds + noise * rng.standard_normal(num_seeds)).tolist() for key, mean in means.items()
    }


def race(scores: dict[int, list[float | None]], plan: Plan = PLAN) -> tuple[Race, dict[int, Standing]]:
    found = run_race(scores, dict.fromkeys(scores, 92.0), plan)
    return found, {one.configuration: one for one in found.standings}


def test_the_beaten_are_dropped_and_the_best_is_left() -> None:
    found, by_key = race(planted({4: 90, 11: 85, 7: 88}))
    assert found.best == 4
    assert found.running == (4,)
    assert (found.too_close, found.next_look) == ((), None)
    assert [one.configuration for one in found.standings] == [4, 7, 11]
    assert by_key[4].probability_best > 0.99
    assert by_key[11].dropped_after is not None
    assert by_key[7].dropped_after is not None
    assert by_key[11].num_seeds == by_key[11].dropped_after <= by_key[7].num_seeds
    assert sum(one.probability_best for one in found.standings) == pytest.approx(1)


def test_dropped_configurations_need_no_more_seeds() -> None:
    scores = planted({1: 90, 2: 90, 3: 80})
    whole, by_key = race(scores)
    dropped = by_key[3].dropped_after
    assert dropped is not None
    assert dropped < whole.standings[0].num_seeds
    assert race({**scores, 3: scores[3][:dropped]})[0] == whole


def test_a_race_waits_for_the_seeds_of_its_next_look() -> None:
    scores = planted({1: 90, 2: 90})
    early, by_key = race({key: row[:2] for key, row in scores.items()})
    assert (early.best, early.next_look) == (None, 3)
    assert {one.probability_best for one in early.standings} == {0.5}
    assert math.isnan(by_key[1].mean)
    later, _ = race({1: scores[1][:7], 2: scores[2][:6]})
    assert [one.num_seeds for one in later.standings] == [5, 5]
    assert later.next_look == 8
    assert later.too_close == ()


def test_equals_are_too_close_to_call() -> None:
    found, _ = race(planted({1: 90, 2: 90, 3: 80}))
    assert sorted(found.too_close) == [1, 2]
    assert found.next_look is None
    assert all(0.02 < one.probability_best < 0.98 for one in found.standings[:2])


def test_identical_scores_are_equally_probable() -> None:
    found, _ = race({1: [3.0, 4.0, 5.0], 2: [3.0, 4.0, 5.0]}, Plan(max_seeds=3))
    assert [one.probability_best for one in found.standings] == [0.5, 0.5]
    assert found.too_close == (1, 2)


def test_one_configuration_is_confirmed_at_the_first_look() -> None:
    found, by_key = race(planted({5: 90}))
    assert (found.best, found.next_look, by_key[5].num_seeds) == (5, None, 3)


def test_selection_bias_has_the_t_interval_of_the_new_seeds() -> None:
    scores = planted({1: 90, 2: 90})
    _, by_key = race(scores)
    values = np.array(scores[1])
    low, high = stats.ttest_1samp(values, 0).confidence_interval(1 - 2 * PLAN.levels[-1])
    one = by_key[1]
    assert one.overstated == pytest.approx(92 - values.mean())
    assert one.overstated_low <= 92 - high + 1e-9
    assert one.overstated_high >= 92 - low - 1e-9
    # skewness widens a bound, by little
    assert one.overstated_high - one.overstated_low < 1.3 * (high - low)


def test_a_configuration_that_does_not_train_is_dropped() -> None:
    scores = planted({1: 90, 2: 90})
    found, by_key = race({**scores, 3: [None] * 20})
    assert by_key[3].dropped_after in (3, 5)
    assert by_key[3].probability_best == 0
    assert math.isnan(by_key[3].mean)
    assert found.best in (1, 2)


def test_the_better_scores_of_a_configuration_that_fails_do_not_drop_the_other() -> None:
    often = [95.0 + 0.1 * seed if seed % 2 else None for seed in range(20)]
    found, by_key = race({1: often, 2: planted({2: 80})[2]})
    assert (found.best, found.running) == (2, (2,))
    assert (by_key[1].num_failed, by_key[1].probability_best) == (3, 0)


def test_nothing_is_best_where_nothing_trains() -> None:
    found, _ = race({1: [None] * 20, 2: [math.nan] * 20})
    assert (found.best, found.too_close, found.next_look) == (None, (), None)


def test_the_probability_against_a_plain_integral() -> None:
    """Two configurations: the posterior of one difference, by quadrature over spread and variance."""
    rng = np.random.default_rng(3)
    scores = rng.normal(0, 1, (2, 6)) + np.array([[0.6], [0.0]])
    difference = scores[0] - scores[1]
    num, mean, variance = len(difference), difference.mean(), difference.var()

    def weight(angle: float, log_sigma: float) -> tuple[float, float]:
        """Of a spread tan(angle) and noise sigma; and the probability that the first is the better there."""
        noise = 2 * math.exp(2 * log_sigma)
        prior = math.tan(angle) ** 2 * noise
        marginal = stats.norm.pdf(mean, 0, math.sqrt(prior + noise / num))
        within = noise ** (-(num - 1) / 2) * math.exp(-num * variance / (2 * noise))
        shrunk = prior / (prior + noise / num)
        return marginal * within, stats.norm.cdf(mean * math.sqrt(shrunk) / math.sqrt(noise / num))

    area = (0, math.pi / 2, -3, 3)
    total = integrate.dblquad(lambda y, x: weight(x, y)[0], *area, epsrel=1e-4)[0]
    better = integrate.dblquad(lambda y, x: math.prod(weight(x, y)), *area, epsrel=1e-4)[0]
    assert probabilities_best(scores, 200_000)[0] == pytest.approx(better / total, abs=0.005)
