"""Is one model as good as another? The decision on arrays.

The question is about the mean difference over new runs (configuration and seed) and new rows together. Runs
and rows are both drawn at random, and neither can stand in for the other (two-way: Owen, arXiv 0712.1111).
Rows that belong together, such as those of an author, are one piece of evidence: a group.

- Runs: a comparison may stop after any number of runs, so the mean of the runs has a confidence sequence. It
  holds for all numbers of runs together. It is a bet against each mean (Waudby-Smith & Ramdas, JRSS B 86,
  2024) and assumes no distribution. It needs a largest loss of a run, `COVERED` margins, and counts larger
  losses as that. So `as good` has a condition about larger losses: `Decision.slack`. Runs of several
  configurations have unlike means: a round of all of them wins no more than a round of equal ones, by the
  inequality of arithmetic and geometric means. A larger loss that is seen counts in full. If the runs vary
  much, the sequence of Student's t is wider and takes its place: a Gaussian mixture over the standardised
  difference, of variance g = `PRIOR` (Lai, Annals of Statistics 1976; Wang & Ramdas, arXiv 2310.03722). With
  n runs and a statistic t, its odds against a mean are (1 + n g)^(-1/2) ((1 + t^2/(n-1)) / (1 + t^2/((n-1)(1
  + n g))))^(n/2). The interval holds the means against which the odds are below 1 / (2 `ALPHA`). With one run
  on each side the question is about these two models.
- Groups: Student's t of the mean difference. All runs share the rows. The widths of runs and groups add as
  squares.

A loss in few groups is far from Gaussian, since a sample may lack these groups entirely. So the interval also
reaches to the `mean_bound` of the groups on both sides. It assumes only that a group changes the metric by at
most its bound: if all of N groups with the bound b agree, it is 3.7 b / N.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import betaincinv, ndtr, stdtrit

Array = NDArray[np.float64]
VerdictName = Literal["as_good", "worse", "not_shown"]

ALPHA = 0.025
"""Stated error of each end of an interval."""
PRIOR = 4.0
"""Variance of the standardised difference in the mixture: narrowest from 6 to 40 runs."""
COVERED = 4.0
"""Largest loss of a run that the interval covers, in margins. Larger losses would need more runs: 15 for 4
margins, 36 for 10."""
_STAKES = np.array([0.25, 0.5, 0.75, 1.0])
_SHARES = np.array([1, 1, 1, 3]) / 6
"""Bets against a mean, as shares of the largest bet, and their shares of the capital. The largest bet wins
most if no run loses anything."""
SHARE_LEVEL = 0.05


@dataclass(frozen=True)
class Decision:
    """A mean difference, higher is better, with its interval and the verdict."""

    difference: float
    low: float
    high: float
    verdict: VerdictName
    slack: float = math.inf
    """With several runs: the verdict holds if losses beyond `COVERED` margins of a run (for `worse`: gains)
    change the mean difference by less than this."""


def decide(differences_R: Array, groups_G: Array, margin: float, *, bounds_G: Array) -> Decision:
    """Decide whether one side is as good as the other.

    Args:
        differences_R: differences of the runs' scores, higher is better.
        groups_G: contributions of the groups to the mean difference; their mean is that of `differences_R`.
        margin: losses below this do not count.
        bounds_G: largest change of the metric by each group, times G. A larger observed change replaces it.
            Infinite: unknown, so the interval is infinite too.

    Returns:
        The mean, its interval, and `as_good` if the whole interval lies above -margin, `worse` if it lies
        below, else `not_shown`.
    """
    mean = float(differences_R.mean())
    of_groups = _group_width(groups_G)
    below, above = (_run_width(sign * differences_R, COVERED * margin) for sign in (1, -1))
    reached = _reached(groups_G, bounds_G)
    low = min(mean - math.hypot(below, of_groups), reached[0])
    high = max(mean + math.hypot(above, of_groups), reached[1])
    is_known = math.isfinite(high - low)
    verdict: VerdictName = "not_shown"
    if is_known and low > -margin:
        verdict = "as_good"
    elif is_known and high < -margin:
        verdict = "worse"
    slack = margin + low if verdict == "as_good" else -margin - high
    return Decision(mean, low, high, verdict, slack if len(differences_R) > 1 else math.inf)


def mean_interval(values_R: Array, groups_G: Array, *, bounds_G: Array) -> tuple[float, float, float]:
    """Return the mean score over runs with its 95 % interval over new runs and new rows.

    The number of runs is fixed, so they have Student's t. The groups add in squares, and the interval reaches
    to the bounds of their mean as in `decide`.

    Args:
        values_R: scores of the runs.
        groups_G: contributions of the groups to the mean score.
        bounds_G: as in `decide`.

    Returns:
        The mean, its lower and its upper bound; these are infinite with one run, one group or unknown bounds.
    """
    num_runs = len(values_R)
    mean = float(values_R.mean())
    if min(num_runs, len(groups_G)) < 2:
        return mean, -math.inf, math.inf
    of_runs = float(stdtrit(num_runs - 1, 1 - ALPHA) * values_R.std(ddof=1)) / math.sqrt(num_runs)
    width = math.hypot(of_runs, _group_width(groups_G))
    low, high = _reached(groups_G - groups_G.mean(), bounds_G)
    return mean, mean + min(low, -width), mean + max(high, width)


def _group_width(groups_G: Array) -> float:
    """Half width of the interval of the groups' mean; infinite for one group."""
    num = len(groups_G)
    if num < 2:
        return math.inf
    return float(stdtrit(num - 1, 1 - ALPHA) * groups_G.std(ddof=1)) / math.sqrt(num)


def _reached(groups_G: Array, bounds_G: Array) -> tuple[float, float]:
    """Bounds of the mean of the groups on both sides; infinite if the effect of a group is unknown."""
    bound = common_bound(np.maximum(bounds_G, np.abs(groups_G)))
    if not math.isfinite(bound):
        return -math.inf, math.inf
    return mean_bound(groups_G, bound), -mean_bound(-groups_G, bound)


def _run_width(differences_R: Array, covered: float) -> float:
    """How far below their mean the mean over new runs may lie, if none loses more than `covered`; 0 for one
    run."""
    if len(differences_R) < 2:
        return 0.0
    kept_R = np.maximum(differences_R, -covered) + covered  # a bet needs values above 0
    mean = float(kept_R.mean())

    def log_excess(tested: float) -> float:
        """Logarithm of the capital after bets against this mean, over the capital that refutes it."""
        with np.errstate(divide="ignore"):
            capital = np.log1p(_STAKES[:, None] * (kept_R / tested - 1)).sum(axis=1)
        return float(np.logaddexp.reduce(capital + np.log(_SHARES))) + math.log(ALPHA)

    least = 1e-6 * mean
    width = mean if not mean or log_excess(least) < 0 else mean - float(brentq(log_excess, least, mean))
    return max(width, half_width(differences_R))


def half_width(values_R: Array) -> float:
    """Return the half width of the confidence sequence of Student's t for the mean, after all values."""
    num = len(values_R)
    if num < 2:
        return math.inf
    mixed = 1 + num * PRIOR
    odds = (1 / (2 * ALPHA)) ** (2 / num) * mixed ** (1 / num)
    if odds >= mixed:  # so few values that any mean is possible
        return math.inf
    factor = math.sqrt((num - 1) * (odds - 1) / (1 - odds / mixed))
    return factor * float(values_R.std(ddof=1)) / math.sqrt(num)


@cache
def runs_needed() -> int:
    """Return the number of runs that can be as good, if all of them agree."""
    num = 2
    while _run_width(np.zeros(num), COVERED) >= 1:
        num += 1
    return num


def mean_bound(values_N: Array, largest_loss: float) -> float:
    """Return a lower bound of level `ALPHA` for the mean of values of at least `-largest_loss`.

    The bound is the `ALPHA` quantile of the mean under random Dirichlet(1, ..., 1) weights of the values and
    of one more value, `-largest_loss` (Gaffke, Math. Methods of Statistics 14, 2005; Learned-Miller & Thomas,
    arXiv 1905.06208). For equal losses it is Clopper's and Pearson's exact bound. For other distributions its
    level is conjectured, without a known counterexample. For many rows it is that of Student's t.
    """
    values, counts = np.unique(np.append(values_N, -largest_loss), return_counts=True)
    if len(values) == 1:
        return float(values[0])
    width = float(values[-1] - values[0])
    scaled = (values - values[0]) / width

    def excess(mean: float) -> float:
        return _probability_below(mean, scaled, counts) - ALPHA

    return float(values[0]) + width * float(brentq(excess, 1e-9, 1 - 1e-9, xtol=1e-6))


def _probability_below(mean: float, values: Array, counts: NDArray[np.intp]) -> float:
    """Probability that the Dirichlet mean of values from 0 to 1 is at most `mean`.

    The mean is at most m if sum_j (v_j - m) G_j <= 0 for gamma variables G_j: its saddlepoint approximation
    (Lugannani & Rice, Advances in Applied Probability 12, 1980), with a relative error below 1 %.
    """
    shifted = values - mean

    def slope(s: float) -> float:
        return float((counts * shifted / (1 - s * shifted)).sum())

    s = brentq(slope, (1 - 1e-12) / shifted[0], (1 - 1e-12) / shifted[-1], rtol=1e-10)
    scale = math.sqrt(float((counts * (shifted / (1 - s * shifted)) ** 2).sum()))
    if abs(s) * scale < 1e-4:  # at the mean of the distribution, where the formula is 0 / 0
        return 0.5 + float((counts * shifted**3).sum()) / (3 * math.sqrt(2 * math.pi) * scale**3)
    w = math.copysign(math.sqrt(2 * float((counts * np.log1p(-s * shifted)).sum())), s)
    density = math.exp(-w * w / 2) / math.sqrt(2 * math.pi)
    return float(ndtr(w) + density * (1 / w - 1 / (s * scale)))


def common_bound(bounds_G: Array) -> float:
    """Return the bound that would hide as large a loss as these bounds, if all groups had it.

    A group that is lost with probability p_g is unseen with probability 1 - p_g. So N groups hide the loss
    sum_g p_g b_g / N where the product of the (1 - p_g) is at least `ALPHA`. The largest such loss has
    1 - p_g = m / b_g in the groups whose bound b_g exceeds some m (by Lagrange). It assumes that bounds are
    distributed in new groups as in these.
    """
    bounds_G = np.sort(bounds_G)[::-1]
    if not len(bounds_G) or not math.isfinite(bounds_G[0]) or bounds_G[0] <= 0:
        return float(bounds_G[0]) if len(bounds_G) else math.inf
    above = bounds_G[bounds_G > 0]
    levels = np.exp((np.log(above).cumsum() + math.log(ALPHA)) / np.arange(1, len(above) + 1))
    num = int(np.argmax(levels >= np.append(above[1:], 0)))  # this m lies above the next bound
    hidden = float((above[: num + 1] - levels[num]).sum())
    return hidden / len(bounds_G) / -math.expm1(math.log(ALPHA) / len(bounds_G))


def excludable_loss(bound: float, num_groups: float) -> float:
    """Return the smallest loss that so many groups with this bound can exclude, if all of them agree."""
    if not (num_groups and math.isfinite(bound)):
        return math.inf
    return bound * -math.expm1(math.log(ALPHA) / num_groups)


def groups_needed(bound: float, margin: float) -> int:
    """Return the number of groups that can exclude a loss of the margin, if all of them agree."""
    return math.ceil(math.log(ALPHA) / math.log1p(-margin / bound)) if margin < bound else 1


def possible_share(num_runs: int, num_seen: int = 0) -> float:
    """Return the largest share of runs of a sort that the seen ones allow (Clopper & Pearson, one-sided 95
    %).

    If none is seen it is 1 - 0.05^(1/n).
    """
    if num_seen >= num_runs:
        return 1.0
    return float(betaincinv(num_seen + 1, num_runs - num_seen, 1 - SHARE_LEVEL))
