"""Is a precision as good as fp32? The decision, on arrays; the simulations of its errors call it too.

The question is of the mean loss over new runs (configuration and seed) and new texts together. Both are drawn
at random, and neither kind of data can stand in for the other (two-way: Owen, arXiv 0712.1111), so the half
width of the interval is sqrt(w^2 + (1.96 se)^2):

- w is of the runs. A comparison looks whenever it likes, so it is a confidence sequence, which holds at all
  numbers of runs together: Student's t with a Gaussian mixture over the standardised difference, of variance
  g = `PRIOR` (Lai, Annals of Statistics 1976; Wang & Ramdas, arXiv 2310.03722). With n runs and a statistic
  t, its odds against a mean are (1 + n g)^(-1/2) ((1 + t^2/(n-1)) / (1 + t^2/((n-1)(1 + n g))))^(n/2); the
  interval has the means against which these are below 1 / (2 `ALPHA`).
- se is of the texts: the jackknife of the mean difference over the rows of the split, which all looks share.

`as_good` is said where the interval lies above -margin, `worse` where it lies below. Each is wrong in at most
`ALPHA` of the comparisons at a true loss of the margin, as far as means of runs and rows are nearly Gaussian.
Two kinds of loss are not, since a sample may lack them whole:

- A loss in few texts. The lower end is at most the `betting_floor`, which assumes only that a row loses at
  most `row_bound`: with rows that all agree it is -ln(2 / ALPHA) / N.
- A collapse of few runs. No test of 12 runs excludes that 5 % of them collapse, and to demand it would take
  some 600. So `collapse_share` says what the runs leave possible, and it stands beside every verdict.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv

from hpo.non_inferiority import signs

Array = NDArray[np.float64]

ALPHA = 0.025
"""One-sided error of a question: of `as_good`, and of `worse`."""
PRIOR = 4.0
"""Variance of the standardised difference in the mixture: narrowest from 6 to 40 runs."""
Z = 1.96
BETS = ((1.0, 1 / 2), (0.5, 1 / 6), (0.25, 1 / 6), (0.125, 1 / 6))
"""The share of the capital that each bet risks, and its part of the capital. The largest has half: where the
rows agree it alone wins fast enough for a margin of half a point and 1,000 rows."""
COLLAPSE_LEVEL = 0.05
_NUM_HALVINGS = 18


@dataclass(frozen=True)
class Decision:
    """What is known of a difference; arrays of the same leading axes, in the unit of the differences."""

    difference: Array
    low: Array
    high: Array
    sign: Array
    """+1 `as_good`, -1 `worse`, 0 `undecided`."""


def decide(
    differences: Array, rows: Array, margin: float, *, row_bound: float = math.inf, step: float = 0.0
) -> Decision:
    """The verdict on a precision.

    Args:
        differences: of each run's score, precision minus fp32, [..., runs]; higher is better.
        rows: what each row of the split adds to their mean, [..., rows]; their mean is that of `differences`.
        row_bound: what a row can lose at most; infinite: nobody knows, and there is no floor.
        step: scores are multiples of it, so that runs which all agree are no proof that none differs.
    """
    mean = differences.mean(axis=-1)
    low, high = interval(differences, rows, step)
    if math.isfinite(row_bound):
        low = np.minimum(low, row_bound * betting_floor(rows / row_bound))
    return Decision(mean, low, high, signs(low, high, margin))


def next_look(num: int) -> int:
    """Return the number of seeds of the next look. Any number would do, but each look costs a little."""
    return max(num + 1, num * 3 // 2)


def interval(differences: Array, rows: Array, step: float = 0.0) -> tuple[Array, Array]:
    """Bounds of the mean difference over new runs and new rows, without the floor."""
    mean, num_rows = differences.mean(axis=-1), rows.shape[-1]
    of_rows = Z * rows.std(axis=-1, ddof=1) / math.sqrt(num_rows) if num_rows > 1 else math.inf
    width = np.hypot(half_width(differences, step), of_rows)
    return np.asarray(mean - width), np.asarray(mean + width)


def half_width(values: Array, step: float = 0.0) -> Array:
    """Of the confidence sequence for the mean over the last axis, after all its values."""
    num = values.shape[-1]
    infinite = np.full(values.shape[:-1], math.inf)
    if num < 2:
        return infinite
    mixed = 1 + num * PRIOR
    odds = (1 / (2 * ALPHA)) ** (2 / num) * mixed ** (1 / num)
    if odds >= mixed:  # so few values that any mean is possible
        return infinite
    t = math.sqrt((num - 1) * (odds - 1) / (1 - odds / mixed))
    deviation = np.maximum(values.std(axis=-1, ddof=1), step / math.sqrt(12))
    return np.asarray(t * deviation / math.sqrt(num))


def betting_floor(rows: Array) -> Array:
    """A lower bound of the mean of values that are at least -1, [..., rows]; it holds whatever their form.

    Against the claim that the mean is -m, somebody bets on each row that it is more. If the claim is true,
    the capital is 1 / ALPHA times that of the start with a probability of at most ALPHA (Waudby-Smith &
    Ramdas, JRSS B 2024). The bound is the smallest loss m that the bets refute.
    """
    shape = rows.shape[:-1]
    below, above = np.full(shape, -16.0), np.zeros(shape)  # ln m
    for _ in range(_NUM_HALVINGS):
        middle = (below + above) / 2
        refuted = _log_capital(rows, np.exp(middle)) >= -math.log(ALPHA)
        below, above = np.where(refuted, below, middle), np.where(refuted, middle, above)
    return np.asarray(-np.exp(above))


def _log_capital(rows: Array, loss: Array) -> Array:
    gains = rows + loss[..., None]
    capitals = [math.log(part) + np.log1p(bet * gains).sum(axis=-1) for bet, part in BETS]
    return np.asarray(np.logaddexp.reduce(capitals))


def collapse_share(num_runs: int, num_collapsed: int = 0) -> float:
    """The largest share of runs that may collapse, after so many (Clopper & Pearson, exact, one-sided 95 %).

    Of none that has collapsed it is 1 - 0.05^(1/n).
    """
    if num_collapsed >= num_runs:
        return 1.0
    return float(betaincinv(num_collapsed + 1, num_runs - num_collapsed, 1 - COLLAPSE_LEVEL))
