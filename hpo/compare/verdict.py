"""Is a precision as good as fp32? A verdict by non-inferiority, after as few seeds as decide it.

`as_good` when the interval lies above -margin, `worse` when it lies below -margin (a loss proved larger than
the margin: a true loss of 0.3 points with a margin of 0.5 is as good, so it must not be called worse after
enough seeds), else `undecided`. The interval's two sides have an error of `Plan.alpha` each, over all looks
and comparisons, so at a true loss of exactly the margin `as_good` and `worse` are each said with a
probability of at most alpha, and `worse` without a true difference far more seldom. The first look that
decides counts; data after it change nothing, so a comparison that was killed and goes on says the same.

Trials without a score. A pair counts only when both sides trained. Trials of the precision that ended
without a score where fp32 trained forbid `as_good` while their share exceeds fp32's by more than
`TOLERATED_FAILURES`, and make it `worse` when they prove that it fails more often than that share of its
trials (binomial test) or, where fp32 fails too, more often than fp32 (Fisher's exact test), at the levels of
the looks: a second error of at most alpha. Where fp32 is proved in this way to fail more often than the
precision, and a configuration has no pairs, no seeds will tell the difference: `undecided` is final, and says
why. A trial that failed by a bug or the machine, or that ran another precision, is no failure of the
precision, and is left out.

What the intervals assume. The seeds are independent between configurations, or the same for all of them on
both sides (the tuned intervals are then too wide). Not allowed are seeds that the configurations of one side
share with each other but not with those of the other side: tuned verdicts would err two to three times as
often as stated. Means over seeds are nearly Gaussian; heavy tails, and skewed noise that both sides have
alike, keep the rates. A loss that is rare and large under the precision alone is not seen in few seeds, so
`as_good` is said too often at a loss of the margin, though less often than by a t test
(tests/benchmarks/README.md has the measured rates). Differences that are all equal have an interval of width
zero, once they are enough: an exact copy is `as_good` and a constant loss `worse` after 5 seeds of several
configurations or 8 of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb, isnan

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc, ndtri

from hpo.compare.estimate import Array, Estimate, as_scores, paired_estimate, tuned_estimate
from hpo.compare.sequential import LOOKS, Plan
from hpo.config.comparison import REFERENCE
from hpo.non_inferiority import VerdictName, decide

Mask = NDArray[np.bool_]
Scores = Sequence[Sequence[float | None]]
"""[configuration][seed] in points, higher is better. None: the trial ended without a score; NaN: it says
nothing of the precision (a failed machine, a device that lacks it), and counts for nothing."""

TOLERATED_FAILURES = 0.05
"""Share of trials that may end without a score where fp32 trains."""
POWER = 0.9
"""Probability with which `seeds_needed` decides, if the true difference and variance are those seen."""


@dataclass(frozen=True)
class Verdict:
    """What is known of a precision against fp32 in one metric."""

    verdict: VerdictName
    difference: float
    """Points, precision minus fp32; NaN where a configuration has fewer than two pairs."""
    low: float
    high: float
    """The interval at the look that counts; infinite where nothing is known."""
    num_seeds: int
    """Seeds of the look that counts; 0 before the first."""
    seeds_needed: int | None
    """The look that would decide with a probability of `POWER`, if the true difference and the variance are
    those seen; None when decided, when the difference lies too near the margin for any in `LOOKS`, or for the
    reason that is given."""
    num_failed: int
    """Trials of the precision that ended without a score, up to the look; for the paired question those of
    which the fp32 twin trained."""
    num_reference_failed: int
    """Likewise of fp32."""
    reason: str = ""
    """Why it is not decided, where the cause is not the scores."""
    reference_fails: bool = False
    """Whether fp32 is proved to end without a score more often than the precision."""

    @property
    def is_final(self) -> bool:
        """Whether more seeds would change nothing."""
        return self.verdict != "undecided" or (self.reference_fails and isnan(self.difference))


def judge_paired(scores: Scores, reference: Scores, plan: Plan) -> Verdict:
    """The same configurations and seeds under a precision and under fp32, in the same order."""
    if len(scores) != len(reference):
        raise ValueError(
            f"Both sides must have the same configurations, but got {len(scores)} and {len(reference)}."
        )

    def look(num_seeds: int) -> tuple[Estimate, Failures]:
        ours, theirs = as_scores(scores, num_seeds), as_scores(reference, num_seeds)
        lost = _lost(scores, num_seeds) | _lost(reference, num_seeds)
        return paired_estimate(ours - theirs), paired_failures(ours, theirs, lost)

    return _judge(look, min(len(row) for row in [*scores, *reference]), plan)


def judge_tuned(scores: Scores, reference: Scores, plan: Plan) -> Verdict:
    """Each precision with its own best configurations; nothing is paired."""

    def look(num_seeds: int) -> tuple[Estimate, Failures]:
        ours, theirs = as_scores(scores, num_seeds), as_scores(reference, num_seeds)
        lost = _lost(scores, num_seeds), _lost(reference, num_seeds)
        return tuned_estimate(ours, theirs), tuned_failures(ours, theirs, *lost)

    return _judge(look, min(len(row) for row in [*scores, *reference]), plan)


@dataclass(frozen=True)
class Failures:
    """Trials that ended without a score."""

    num: int
    num_trials: int
    num_reference: int
    num_reference_trials: int
    num_lost: int = 0
    """Trials, or pairs, that count for nothing."""

    @property
    def more_than_reference(self) -> bool:
        return self.num * self.num_reference_trials > self.num_reference * self.num_trials

    @property
    def more_than_tolerated(self) -> bool:
        """Whether the share that was seen exceeds that of fp32 by more than is tolerated."""
        more = self.num * self.num_reference_trials - self.num_reference * self.num_trials
        return more > TOLERATED_FAILURES * self.num_trials * self.num_reference_trials

    @property
    def of_reference(self) -> Failures:
        """The same with the sides changed."""
        return Failures(
            self.num_reference, self.num_reference_trials, self.num, self.num_trials, self.num_lost
        )

    @property
    def p_value(self) -> float:
        """Of the hypothesis that the precision fails no more often than is tolerated."""
        if not self.num_reference:
            return float(bdtrc(self.num - 1, self.num_trials, TOLERATED_FAILURES)) if self.num else 1.0
        failed = self.num + self.num_reference
        ways = [
            comb(self.num_trials, ours) * comb(self.num_reference_trials, failed - ours)
            for ours in range(self.num, failed + 1)
        ]
        return sum(ways) / comb(self.num_trials + self.num_reference_trials, failed)


def paired_failures(scores: Array, reference: Array, lost: Mask | None = None) -> Failures:
    """Failures of one side where the other trained; `lost` are the pairs that count for nothing."""
    lost = np.zeros(scores.shape, dtype=bool) if lost is None else lost
    ours, theirs = np.isnan(scores) & ~lost, np.isnan(reference) & ~lost
    both = int((ours & theirs).sum())
    num_lost = int(lost.sum())
    num_trials = ours.size - num_lost - both
    return Failures(int(ours.sum()) - both, num_trials, int(theirs.sum()) - both, num_trials, num_lost)


def tuned_failures(scores: Array, reference: Array, lost: Mask, reference_lost: Mask) -> Failures:
    """Failures of each side; trials that are lost count for nothing."""
    return Failures(
        int((np.isnan(scores) & ~lost).sum()),
        int((~lost).sum()),
        int((np.isnan(reference) & ~reference_lost).sum()),
        int((~reference_lost).sum()),
        int(lost.sum() + reference_lost.sum()),
    )


def _lost(rows: Scores, num_seeds: int) -> Mask:
    """Which trials say nothing of the precision."""
    return np.array([[value is not None and isnan(value) for value in row[:num_seeds]] for row in rows])


def _judge(look: Callable[[int], tuple[Estimate, Failures]], num_seeds: int, plan: Plan) -> Verdict:
    counted: Verdict | None = None
    for num, level in zip(plan.looks, plan.levels, strict=True):
        if num > num_seeds:
            break
        estimate, failures = look(num)
        low, high = (float(bound) for bound in estimate.interval(level))
        name = decide(low, high, plan.margin)
        if failures.p_value <= level:
            name = "worse"
        elif name == "as_good" and failures.more_than_tolerated:
            name = "undecided"
        difference = float(estimate.difference)
        reason = _reason(difference, failures, plan) if name == "undecided" else ""
        counted = Verdict(
            verdict=name,
            difference=difference,
            low=low,
            high=high,
            num_seeds=num,
            seeds_needed=seeds_needed(estimate, num, plan) if name == "undecided" and not reason else None,
            num_failed=failures.num,
            num_reference_failed=failures.num_reference,
            reason=reason,
            reference_fails=failures.of_reference.p_value <= level,
        )
        if counted.is_final:
            break
    return counted or Verdict("undecided", np.nan, -np.inf, np.inf, 0, plan.looks[0], 0, 0)


def _reason(difference: float, failures: Failures, plan: Plan) -> str:
    """Why no number of seeds can be named, where the cause is not the scores; empty: they decide."""
    if isnan(plan.margin):
        return "the margin is in another unit"
    if isnan(difference) and failures.num_reference and not failures.num:
        num, of = failures.num_reference, failures.num_reference_trials
        return f"{num} of {of} trials of {REFERENCE} ended without a score"
    if failures.more_than_tolerated and not difference < -plan.margin:
        share = f"at most {100 * TOLERATED_FAILURES:g} % more than of {REFERENCE}'s are as good"
        return f"{failures.num} of {failures.num_trials} trials ended without a score, and {share}"
    if isnan(difference) and failures.num_lost:
        return f"{failures.num_lost} trials say nothing: they failed, or ran in another precision"
    return ""


def seeds_needed(estimate: Estimate, num_seeds: int, plan: Plan) -> int | None:
    """The first look after `num_seeds` that would decide; beyond the plan, one look of an extension."""
    levels = dict(zip(plan.looks, plan.levels, strict=True))
    last = plan.looks[-1]
    for num in sorted({*plan.looks, *LOOKS}):
        if num > last:
            levels[num] = plan.spent(num) - plan.spent(last)
        if num > num_seeds and num in levels:
            then = estimate.after(num, num_seeds)
            low, high = then.interval(levels[num])
            power = ndtri(POWER) * then.standard_error
            if low - power > -plan.margin or high + power < -plan.margin:
                return num
    return None
