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
- se belongs to the rows: the jackknife of the mean difference. All looks share the rows.

A loss in few rows is far from Gaussian, since a sample may lack these rows entirely. So the interval also
reaches to the `betting_floor` on both sides. The floor assumes only that a row changes the metric by at most
`row_bound`: if all rows agree, it is about 4 row_bound / N.

A collapse of few runs cannot be excluded by few runs either: 600 runs are necessary for half a per cent.
`collapse_share` states the share of runs that may collapse.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv

Array = NDArray[np.float64]
VerdictName = Literal["as_good", "worse", "not_shown"]

ALPHA = 0.025
"""Stated error of each end of an interval."""
PRIOR = 4.0
"""Variance of the standardised difference in the mixture: narrowest from 6 to 40 runs."""
Z = 2.1
"""Standard errors of the rows on each side; more than 1.96, since all looks share the rows."""
BETS = ((1.0, 0.75), (0.5, 0.1), (0.25, 0.1), (0.125, 0.05))
"""The share of the capital that each bet risks, and its part of the capital. The largest bet has most of the
capital: if the rows agree, it wins fast enough for a margin of half a point and 1,000 rows."""
COLLAPSE_LEVEL = 0.05
_NUM_HALVINGS = 24


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
        margin: a smaller loss does not count.
        row_bound: largest change of the metric that a row can cause, times N. A larger change that was
            seen takes its place. Infinite: unknown, so the interval is infinite too.
        step: the smallest change of a score, so that runs that agree do not prove that none differs.

    Returns:
        The mean, its interval, and `as_good` if the whole interval lies above -margin, `worse` if it lies
        below, else `not_shown`.
    """
    mean = float(differences_R.mean())
    low, high = interval(differences_R, rows_N, step)
    bound = max(row_bound, float(np.abs(rows_N).max(initial=0.0)))
    if bound > 0:
        low, high = min(low, bound * betting_floor(rows_N / bound)), max(high, -bound * betting_floor(-rows_N / bound))
    is_known = math.isfinite(low) and math.isfinite(high)
    verdict: VerdictName = "not_shown"
    if is_known and low > -margin:
        verdict = "as_good"
    elif is_known and high < -margin:
        verdict = "worse"
    return Decision(mean, low, high, verdict)


def interval(differences_R: Array, rows_N: Array, step: float = 0.0) -> tuple[float, float]:
    """Bounds of the mean difference over new runs and new rows, without the floor."""
    mean, num_rows = float(differences_R.mean()), len(rows_N)
    of_rows = Z * float(rows_N.std(ddof=1)) / math.sqrt(num_rows) if num_rows > 1 else math.inf
    of_runs = half_width(differences_R, step) if len(differences_R) > 1 else 0.0
    width = math.hypot(of_runs, of_rows)
    return mean - width, mean + width


def half_width(values_R: Array, step: float = 0.0) -> float:
    """Half width of the confidence sequence for the mean, after all values."""
    num = len(values_R)
    if num < 2:
        return math.inf
    mixed = 1 + num * PRIOR
    odds = (1 / (2 * ALPHA)) ** (2 / num) * mixed ** (1 / num)
    if odds >= mixed:  # so few values that any mean is possible
        return math.inf
    t = math.sqrt((num - 1) * (odds - 1) / (1 - odds / mixed))
    return t * max(float(values_R.std(ddof=1)), step / math.sqrt(12)) / math.sqrt(num)


def betting_floor(values_N: Array) -> float:
    """A lower bound of the mean of values that are at least -1, whatever their distribution.

    Against the claim that the mean is -m, somebody bets on each value that it is more. If the claim is true,
    the capital reaches 1 / ALPHA times its start with a probability of at most ALPHA (Waudby-Smith & Ramdas,
    JRSS B 2024). The bound is the smallest loss m that the bets refute.
    """
    if math.isinf(values_N.max(initial=0.0)) or not len(values_N):
        return -math.inf
    values, counts = np.unique(values_N, return_counts=True)
    below, above = -16.0, 1.0  # ln m
    for _ in range(_NUM_HALVINGS):
        middle = (below + above) / 2
        if _log_capital(values, counts, math.exp(middle)) >= -math.log(ALPHA):
            above = middle
        else:
            below = middle
    return -math.exp(above)


def _log_capital(values: Array, counts: NDArray[np.intp], loss: float) -> float:
    capitals = [math.log(part) + float(counts @ np.log1p(bet * (values + loss))) for bet, part in BETS]
    return float(np.logaddexp.reduce(capitals))


def excludable_loss(row_bound: float, num_rows: int) -> float:
    """The smallest loss that so many rows can exclude, if all of them agree."""
    return -row_bound * betting_floor(np.zeros(num_rows)) if math.isfinite(row_bound) else math.inf


def collapse_share(num_runs: int, num_collapsed: int = 0) -> float:
    """The largest share of runs that may collapse, after so many (Clopper & Pearson, exact, one-sided 95 %).

    If none has collapsed, it is 1 - 0.05^(1/n).
    """
    if num_collapsed >= num_runs:
        return 1.0
    return float(betaincinv(num_collapsed + 1, num_runs - num_collapsed, 1 - COLLAPSE_LEVEL))
