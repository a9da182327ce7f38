"""Verdicts on planted differences, with trials that ended without a score, and over looks."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from hpo.compare.sequential import Plan
from hpo.compare.verdict import Failures, Scores, judge_paired, judge_tuned

PLAN = Plan()
FP32 = np.random.default_rng(0).normal(80, 1, (3, 20))


def planted(difference: float, noise: float, num_seeds: int = 20, seed: int = 1) -> Scores:
    rng = np.random.default_rng(seed)
    return (FP32 + difference + noise * rng.standard_normal(FP32.shape))[:, :num_seeds].tolist()


def reference(num_seeds: int = 20) -> Scores:
    return FP32[:, :num_seeds].tolist()


@pytest.mark.parametrize(("num_configurations", "num_seeds"), [(1, 8), (3, 5)])
@pytest.mark.parametrize(("difference", "expected"), [(0.0, "as_good"), (-2.0, "worse")])
def test_equal_differences_are_decided_but_not_by_the_first_seeds(
    num_configurations: int, num_seeds: int, difference: float, expected: str
) -> None:
    """An exact copy, and a constant loss."""
    plain = reference()[:num_configurations]
    rows = [[score + difference for score in row] for row in plain]
    for early in range(1, num_seeds):
        found = judge_paired([row[:early] for row in rows], plain, PLAN)
        assert found.verdict == "undecided"
        assert found.num_seeds == max((look for look in PLAN.looks if look <= early), default=0)
        assert found.seeds_needed == (3 if early < 3 else num_seeds)
    found = judge_paired(rows, plain, PLAN)
    assert (found.verdict, found.num_seeds, found.seeds_needed) == (expected, num_seeds, None)
    assert found.low == pytest.approx(difference, abs=1e-9)
    assert found.high == pytest.approx(difference, abs=1e-9)


@pytest.mark.parametrize(
    ("difference", "expected"),
    [(0.0, "as_good"), (-0.3, "as_good"), (1.0, "as_good"), (-2.0, "worse"), (-0.8, "worse")],
)
def test_planted_differences(difference: float, expected: str) -> None:
    found = judge_paired(planted(difference, 0.2), reference(), PLAN)
    assert found.verdict == expected
    assert found.low < difference < found.high


def test_tuned_scores_are_not_paired() -> None:
    """The seeds' spread counts, which cancels in pairs."""
    paired = judge_paired(planted(0.0, 0.1)[:1], reference()[:1], PLAN)
    tuned = judge_tuned(planted(0.0, 0.1)[:1], reference()[:1], PLAN)
    assert paired.verdict == "as_good"
    assert tuned.verdict == "undecided"
    assert tuned.num_seeds > paired.num_seeds
    far = judge_tuned(planted(-9.0, 0.1)[:2], reference(), PLAN)
    assert far.verdict == "worse"


def test_noise_hides_a_difference_and_the_number_of_seeds_that_is_named_decides() -> None:
    """`seeds_needed` promises 90 % when the truth is what was seen; 200 comparisons that go on are asked."""
    plan = Plan(min_seeds=5, max_seeds=5)
    decided = 0
    num = 200
    for seed in range(num):
        rng = np.random.default_rng(seed)
        seen = rng.normal(0, 1, 5)
        seen = (seen - seen.mean()) / seen.std(ddof=1) * 0.6
        found = judge_paired([seen.tolist()], [[0.0] * 5], plan)
        assert found.verdict == "undecided"
        assert found.seeds_needed is not None
        more = np.append(seen, rng.normal(0, 0.6, found.seeds_needed - 5))
        extended = replace(plan, extensions=(found.seeds_needed,))
        decided += judge_paired([more.tolist()], [[0.0] * len(more)], extended).verdict == "as_good"
    assert stats.binomtest(decided, num, 0.9, alternative="less").pvalue > 0.01


def test_no_number_of_seeds_decides_a_difference_that_sits_on_the_margin() -> None:
    differences = [-0.5 - 0.3, -0.5 + 0.3, -0.5]
    found = judge_paired([differences], [[0.0] * 3], PLAN)
    assert (found.verdict, found.seeds_needed) == ("undecided", None)


def test_more_comparisons_need_more_evidence() -> None:
    scores, plain = planted(0.0, 0.5), reference()
    alone, corrected = (judge_paired(scores, plain, Plan(num_comparisons=num)) for num in (1, 12))
    assert alone.verdict == corrected.verdict == "as_good"
    assert alone.num_seeds < corrected.num_seeds


def test_what_comes_after_the_deciding_look_changes_nothing() -> None:
    """So a comparison that goes on after a kill says the same, however many trials had been started."""
    scores, plain = planted(-2.0, 0.1), reference()
    first = judge_paired(scores, plain, PLAN)
    assert first.num_seeds < 20
    seeds = first.num_seeds
    assert judge_paired([row[:seeds] for row in scores], [row[:seeds] for row in plain], PLAN) == first
    changed = [row[:seeds] + [99.0] * (20 - seeds) for row in scores]
    assert judge_paired(changed, plain, PLAN) == first


def test_a_look_waits_for_all_configurations() -> None:
    rows = planted(0.0, 0.1)
    found = judge_paired([*rows[:2], rows[2][:2]], reference(), PLAN)
    assert (found.verdict, found.num_seeds) == ("undecided", 0)


def test_paired_sides_must_have_the_same_configurations() -> None:
    with pytest.raises(ValueError, match="same configurations, but got 2 and 3"):
        judge_paired(planted(0, 1)[:2], reference(), PLAN)


@pytest.mark.parametrize("judge", [judge_paired, judge_tuned])
def test_a_precision_that_never_trains_is_worse(judge: type[judge_paired]) -> None:
    found = judge([[None] * 3] * 3, reference(3), PLAN)
    assert (found.verdict, found.num_failed, found.num_reference_failed) == ("worse", 9, 0)
    assert math.isnan(found.difference)
    assert (found.low, found.high) == (-math.inf, math.inf)


def test_a_failure_in_few_trials_is_not_as_good_and_in_more_of_them_it_is() -> None:
    scores, plan = reference(), Plan(min_seeds=5, max_seeds=20)
    scores[0][4] = None
    found = judge_paired([row[:5] for row in scores], reference(5), plan)
    assert (found.verdict, found.difference, found.num_failed) == ("undecided", 0.0, 1)
    found = judge_paired(scores, reference(), plan)
    assert (found.verdict, found.num_seeds, found.num_failed) == ("as_good", 8, 1)


def test_few_failures_are_tolerated_and_more_of_them_are_said_not_counted_in_seeds() -> None:
    """One of 36 trials is, three are not; no seeds are promised, since those would fail as often."""
    plan = Plan(min_seeds=12, max_seeds=20)
    scores = [row[:12] for row in planted(0.0, 0.1)]
    scores[0][4] = None
    assert judge_paired(scores, reference(12), plan).verdict == "as_good"
    scores[1][4] = scores[2][3] = None
    found = judge_paired(scores, reference(12), plan)
    assert (found.verdict, found.seeds_needed, found.is_final) == ("undecided", None, False)
    assert found.reason.startswith("3 of 36 trials ended without a score")


@pytest.mark.parametrize("judge", [judge_paired, judge_tuned])
def test_trials_that_say_nothing_are_no_failures(judge: type[judge_paired]) -> None:
    scores = planted(0.0, 0.1)
    scores[0][0] = scores[1][3] = scores[2][5] = math.nan
    found = judge(scores, reference(), PLAN)
    assert found.num_failed == 0
    nothing = judge([[math.nan] * 3] * 3, reference(3), PLAN)
    assert (nothing.verdict, nothing.num_failed) == ("undecided", 0)
    assert nothing.reason == "9 trials say nothing: they failed, or ran in another precision"


@pytest.mark.parametrize("judge", [judge_paired, judge_tuned])
def test_fp32_that_never_trains_is_said(judge: type[judge_paired]) -> None:
    found = judge(reference(), [[None] * 20] * 3, PLAN)
    assert (found.verdict, found.num_seeds, found.is_final) == ("undecided", 3, True)
    assert (found.reference_fails, found.seeds_needed) == (True, None)
    assert found.reason == "9 of 9 trials of fp32 ended without a score"


def test_a_configuration_that_fails_under_both_precisions_alike_speaks_against_neither() -> None:
    scores, plain = reference(), reference()
    scores[0][1] = None
    plain[0][1] = plain[2][0] = scores[1][2] = None
    found = judge_paired(scores, plain, PLAN)
    assert (found.verdict, found.num_failed, found.num_reference_failed) == ("as_good", 1, 1)


def test_failures_against_scipys_tests() -> None:
    assert Failures(3, 20, 0, 20).p_value == pytest.approx(
        stats.binomtest(3, 20, 0.05, alternative="greater").pvalue
    )
    assert Failures(0, 20, 0, 20).p_value == 1
    table = [[7, 13], [2, 18]]
    assert Failures(7, 20, 2, 20).p_value == pytest.approx(stats.fisher_exact(table, "greater").pvalue)
