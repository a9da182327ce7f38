"""Levels of the looks: against closed forms, and against t tests of simulated scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from hpo.compare.sequential import LOOKS, Plan, nominal_levels


def test_looks_begin_with_the_fewest_seeds_and_end_with_the_most() -> None:
    assert Plan().looks == (3, 5, 8, 12, 20)
    assert Plan(min_seeds=4, max_seeds=10).looks == (4, 5, 8, 10)
    assert Plan(max_seeds=3).looks == (3,)
    assert Plan(max_seeds=10, extensions=(25,)).looks == (3, 5, 8, 10, 12, 20, 25)
    assert [Plan().next_look(num) for num in (0, 3, 4, 12, 20)] == [3, 5, 5, 20, None]


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        (
            {"min_seeds": 2},
            r"3 <= min_seeds <= max_seeds <= 200 must hold, but got \(min_seeds=2, max_seeds=20\)",
        ),
        ({"max_seeds": 2}, r"got \(min_seeds=3, max_seeds=2\)"),
        ({"max_seeds": 201}, r"got \(min_seeds=3, max_seeds=201\)"),
        *(
            ({"extensions": more}, "max_seeds < extensions <= 200 must hold, ascending, but got ")
            for more in ((20,), (32, 25), (32, 32), (201,))
        ),
    ],
)
def test_impossible_plans_are_refused(seeds: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(**seeds)


def test_all_looks_together_spend_no_more_than_alpha() -> None:
    assert Plan().spent(20) == pytest.approx(0.045)
    assert Plan(num_comparisons=3).spent(20) == pytest.approx(0.015)
    assert Plan(max_seeds=20, extensions=(LOOKS[-1],)).spent(LOOKS[-1]) < 0.05


def test_an_extension_keeps_the_levels_of_the_looks_before_it() -> None:
    """Also one after another, to an end that is no look otherwise."""
    plans = [Plan(max_seeds=8, extensions=more) for more in ((), (15,), (15, 20), (15, 20, 32))]
    assert plans[-1].looks == (3, 5, 8, 12, 15, 20, 32)
    for plan in plans:
        assert plans[-1].levels[: len(plan.levels)] == plan.levels


def test_the_first_look_spends_what_it_may() -> None:
    for look in (3, 4, 7):
        assert nominal_levels((look,), (0.01,))[0] == pytest.approx(0.01, rel=1e-3)


def test_later_levels_lie_between_those_of_a_union_bound_and_of_one_test() -> None:
    levels = nominal_levels((3, 5, 8), (0.01, 0.02, 0.03))
    assert 0.01 < levels[1] < 0.02
    assert 0.01 < levels[2] < 0.03


@pytest.mark.parametrize("plan", [Plan(), Plan(max_seeds=5), Plan(max_seeds=5, extensions=(8, 20))], ids=str)
def test_levels_are_exact_for_gaussian_scores(plan: Plan) -> None:
    """The share of 200,000 sequences that t tests reject at the looks up to each is what may be spent."""
    num = 200_000
    scores = np.random.default_rng(0).standard_normal((num, plan.looks[-1]))
    rejected = np.zeros(num, dtype=bool)
    for look, level in zip(plan.looks, plan.levels, strict=True):
        seen = scores[:, :look]
        t = seen.mean(axis=1) / (seen.std(axis=1, ddof=1) / look**0.5)
        rejected |= t > stats.t.ppf(1 - level, look - 1)
        spent = plan.spent(look)
        assert rejected.mean() == pytest.approx(spent, abs=4 * (spent / num) ** 0.5)
