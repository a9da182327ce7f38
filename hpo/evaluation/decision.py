"""Is one model as good as another? The decision on arrays.

The question is about the mean difference over new runs (configuration and seed) and new rows together. Runs
and rows are both drawn at random, and neither can stand in for the other (two-way: Owen, arXiv 0712.1111). So
the half width of the interval is sqrt(w^2 + (z se)^2):

- w belongs to the runs. A comparison may stop after any number of runs, so w is the half width of a
  confidence sequence, which holds for all numbers of runs together: Student's t with a Gaussian mixture over
  the standardised difference, of variance g = `PRIOR` (Lai, Annals of Statistics 1976; Wang & Ramdas, arXiv
  2310.03722). With n runs and a statistic t, its odds against a mean are (1 + n g)^(-1/2) ((1 + t^2/(n-1)) /
  (1 + t^2/((n-1)(1 + n g))))^(n/2). The interval holds the means against which the odds are below
  1 / (2 `ALPHA`). With one run on each side the question is about these two models, and w is 0.
- se belongs to the rows: the jackknife of the mean difference. All runs share the rows.

A loss in few rows is far from Gaussian, since a sample may lack these rows entirely. So the interval also
reaches to the `mean_bound` of the rows on both sides. It assumes only that a row changes the metric by at
most `row_bound`: if all N rows agree, it is 3.7 row_bound / N.

A collapse of few runs cannot be excluded by few runs either: 600 runs are necessary for half a per cent.
`collapse_share` states the share of runs that may collapse.
"""

import math
from dataclasses import dataclass
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
Z = 1.96
COLLAPSE_LEVEL = 0.05


@dataclass(frozen=True)
class Decision:
    """A mean difference, higher is better, with its interval and the verdict."""

    difference: float
    low: float
    high: float
    verdict: VerdictName


def decide(
    differences_R: Array, rows_N: Array, margin: float, *, row_bound: float, step: float = 0.0
) -> Decision:
    """Decide whether one side is as good as the other.

    Args:
        differences_R: differences of the runs' scores, higher is better.
        rows_N: contributions of the rows to the mean difference; their mean is that of `differences_R`.
        margin: losses below this do not count.
        row_bound: largest change of the metric by one row, times N. A larger observed change replaces it.
            Infinite: unknown, so the interval is infinite too.
        step: smallest change of a score: equal runs do not prove that none differs.

    Returns:
        The mean, its interval, and `as_good` if the whole interval lies above -margin, `worse` if it lies
        below, else `not_shown`.
    """
    mean = float(differences_R.mean())
    low, high = interval(differences_R, rows_N, step)
    of_rows = _row_bounds(rows_N, row_bound)
    low, high = min(low, of_rows[0]), max(high, of_rows[1])
    is_known = math.isfinite(high - low)
    verdict: VerdictName = "not_shown"
    if is_known and low > -margin:
        verdict = "as_good"
    elif is_known and high < -margin:
        verdict = "worse"
    return Decision(mean, low, high, verdict)


def mean_interval(values_R: Array, rows_N: Array, *, row_bound: float) -> tuple[float, float, float]:
    """Return the mean score over runs with its 95 % interval over new runs and new rows.

    The number of runs is fixed, so they have Student's t. The rows add in squares, and the interval reaches
    to the bounds of their mean as in `decide`.

    Args:
        values_R: scores of the runs.
        rows_N: contributions of the rows to the mean score.
        row_bound: as in `decide`.

    Returns:
        The mean, its lower and its upper bound; these are infinite with one run, one row or no `row_bound`.
    """
    num_runs, num_rows = len(values_R), len(rows_N)
    mean = float(values_R.mean())
    if min(num_runs, num_rows) < 2:
        return mean, -math.inf, math.inf
    of_runs = float(stdtrit(num_runs - 1, 1 - ALPHA) * values_R.std(ddof=1)) / math.sqrt(num_runs)
    width = math.hypot(of_runs, Z * float(rows_N.std(ddof=1)) / math.sqrt(num_rows))
    low, high = _row_bounds(rows_N - rows_N.mean(), row_bound)
    return mean, mean + min(low, -width), mean + max(high, width)


def _row_bounds(rows_N: Array, row_bound: float) -> tuple[float, float]:
    """Bounds of the mean of the rows on both sides; infinite if the effect of a row is unknown."""
    bound = max(row_bound, float(np.abs(rows_N).max(initial=0.0)))
    if not math.isfinite(bound):
        return -math.inf, math.inf
    return mean_bound(rows_N, bound), -mean_bound(-rows_N, bound)


def interval(differences_R: Array, rows_N: Array, step: float = 0.0) -> tuple[float, float]:
    """Return the bounds of the mean difference over new runs and new rows, without the bounds of the rows."""
    mean, num_rows = float(differences_R.mean()), len(rows_N)
    of_rows = Z * float(rows_N.std(ddof=1)) / math.sqrt(num_rows) if num_rows > 1 else math.inf
    of_runs = half_width(differences_R, step) if len(differences_R) > 1 else 0.0
    width = math.hypot(of_runs, of_rows)
    return mean - width, mean + width


def half_width(values_R: Array, step: float = 0.0) -> float:
    """Return the half width of the confidence sequence for the mean, after all values."""
    num = len(values_R)
    if num < 2:
        return math.inf
    mixed = 1 + num * PRIOR
    odds = (1 / (2 * ALPHA)) ** (2 / num) * mixed ** (1 / num)
    if odds >= mixed:  # so few values that any mean is possible
        return math.inf
    factor = math.sqrt((num - 1) * (odds - 1) / (1 - odds / mixed))
    return factor * max(float(values_R.std(ddof=1)), step / math.sqrt(12)) / math.sqrt(num)


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


def excludable_loss(row_bound: float, num_rows: int) -> float:
    """Return the smallest loss that so many rows can exclude, if all of them agree."""
    if not (num_rows and math.isfinite(row_bound)):
        return math.inf
    return row_bound * -math.expm1(math.log(ALPHA) / num_rows)


def rows_needed(row_bound: float, margin: float) -> int:
    """Return the number of rows that can exclude a loss of the margin, if all of them agree."""
    return math.ceil(math.log(ALPHA) / math.log1p(-margin / row_bound)) if margin < row_bound else 1


def collapse_share(num_runs: int, num_collapsed: int = 0) -> float:
    """Return the largest possible share of collapsing runs (Clopper & Pearson, exact, one-sided 95 %).

    Without a collapse it is 1 - 0.05^(1/n).
    """
    if num_collapsed >= num_runs:
        return 1.0
    return float(betaincinv(num_collapsed + 1, num_runs - num_collapsed, 1 - COLLAPSE_LEVEL))
