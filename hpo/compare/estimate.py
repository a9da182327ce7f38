"""What one look at the scores says: a difference, its standard error, and degrees of freedom.

Paired question: the same configurations and seeds under both precisions. The estimand is the mean over the
compared configurations (fixed: they are the ones asked about) of the mean difference over seeds. Each
configuration may have a variance of its own, so with v_c = s_c^2 / n_c of C configurations the standard error
is sqrt(sum v_c) / C, and its degrees of freedom are Satterthwaite's (Biometrics Bulletin 1946),
(sum v_c)^2 / sum(v_c^2 / (n_c - 1)). Tuned question: each precision's own configurations, not paired; the
same with the variances of both sides (Welch, Biometrika 1947).

The t interval assumes a symmetrical difference. Where a precision rarely loses much, few seeds often show
neither the loss nor the variance, and its lower bound is too high. So each bound is the farther of Student's
and of the one by Hall's transformation (JRSS B 1992; Zhou & Dinh, Biostatistics 2005, for several samples),
which corrects t for the skewness seen: with A the third cumulant of the difference over se^3,
t' = t + A t^2 / 3 + A^2 t^3 / 27 + A / 6. It can only widen the interval.

Differences that are all equal show no variance, but scores come in steps (of one text of the test split), and
a few equal ones in a row are no rarity. An interval of width zero is believed when, if only every second run
had this difference, that many equal ones would be less probable than the level: from 5 values on at 0.05.

Functions take arrays [..., configurations, seeds] with NaN for a missing score, and keep leading axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

Array = NDArray[np.float64]

_NO_SPREAD = 1e-18
"""Variance of differences that are equal but for rounding."""


@dataclass(frozen=True)
class Estimate:
    """A difference with its uncertainty. NaN where a configuration has fewer than two values."""

    difference: Array
    variance: Array
    """Of the difference, not of the scores."""
    df: Array
    third_cumulant: Array
    """Of the difference; configurations with fewer than three values add nothing."""

    @property
    def standard_error(self) -> Array:
        return np.asarray(np.sqrt(self.variance))

    def interval(self, level: float) -> tuple[Array, Array]:
        """Bounds that each miss with the one-sided probability `level`; infinite where nothing is known."""
        t = stdtrit(self.df, 1 - level)
        skewness = self.third_cumulant / np.where(self.variance > 0, self.variance, 1) ** 1.5
        below = np.maximum(t, _skewed(t, skewness)) * self.standard_error
        above = np.maximum(t, -_skewed(-t, skewness)) * self.standard_error
        known = np.isfinite(below) & ((self.variance > _NO_SPREAD) | (0.5 ** (self.df + 1) <= level))
        return (
            np.where(known, self.difference - below, -np.inf),
            np.where(known, self.difference + above, np.inf),
        )

    def after(self, num_seeds: int, of: int) -> Estimate:
        """What `num_seeds` would give where this has `of`, if the scores go on as they were."""
        ratio = num_seeds / of
        return Estimate(
            self.difference,
            self.variance / ratio,
            self.df * (num_seeds - 1) / (of - 1),
            self.third_cumulant / ratio**2,
        )


@dataclass(frozen=True)
class Ratio:
    """A geometric mean of ratios with its interval; the bounds are None where too few pairs are there."""

    ratio: float
    low: float | None
    high: float | None
    num_pairs: int
    """Where nothing is paired, the values of the side with fewer."""


def ratio_json(name: str, ratio: Ratio | None) -> dict[str, float | None]:
    """The ratio with its interval under `name`; all None where nothing tells it."""
    if ratio is None:
        return dict.fromkeys((name, f"{name}_low", f"{name}_high"))
    return {name: ratio.ratio, f"{name}_low": ratio.low, f"{name}_high": ratio.high}


def as_scores(rows: Sequence[Sequence[float | None]], num_seeds: int | None = None) -> Array:
    """[configurations, seeds] of the first `num_seeds` seeds, by default of those that every row has."""
    shortest = min(len(row) for row in rows)
    num_seeds = shortest if num_seeds is None else num_seeds
    return np.array([row[:num_seeds] for row in rows], dtype=np.float64).reshape(len(rows), num_seeds)


def paired_estimate(differences: ArrayLike) -> Estimate:
    """Mean difference over configurations and seeds; a missing pair counts for nothing here."""
    values = np.asarray(differences, dtype=np.float64)
    there = np.isfinite(values)
    num = there.sum(-1).astype(np.float64)
    num[num < 2] = np.nan
    mean = np.where(there, values, 0).sum(-1) / num
    centred = np.where(there, values - mean[..., None], 0)
    variance = (centred**2).sum(-1) / (num - 1) / num
    third = np.where(num > 2, (centred**3).sum(-1) / ((num - 1) * np.where(num > 2, num - 2, 1) * num), 0)
    weight = 1 / values.shape[-2]
    return Estimate(
        mean.mean(-1),
        variance.sum(-1) * weight**2,
        _satterthwaite(variance, num - 1),
        third.sum(-1) * weight**3,
    )


def tuned_estimate(scores: ArrayLike, reference: ArrayLike) -> Estimate:
    """Difference of the means of two sets of configurations, each with seeds of its own."""
    ours = paired_estimate(scores)
    theirs = paired_estimate(reference)
    variances = np.stack(np.broadcast_arrays(ours.variance, theirs.variance), axis=-1)
    dfs = np.stack(np.broadcast_arrays(ours.df, theirs.df), axis=-1)
    return Estimate(
        ours.difference - theirs.difference,
        variances.sum(-1),
        _satterthwaite(variances, dfs),
        ours.third_cumulant - theirs.third_cumulant,
    )


Rows = Sequence[Sequence[float | None]]
"""[configuration][seed]."""


def ratio_estimate(values: Rows, reference: Rows, level: float) -> Ratio:
    """Geometric mean of `values / reference` by pairs; a t interval of the logarithms, one-sided `level`.

    Pairs without a value on one side are left out, configurations without a pair as well. Raises ValueError
    where no pair is left.
    """
    logs = _with_values(np.log(as_scores(values)) - np.log(as_scores(reference)))
    return _ratio(paired_estimate(logs), _mean(logs), _num(logs), level)


def tuned_ratio_estimate(values: Rows, reference: Rows, level: float) -> Ratio:
    """Geometric mean of `values` over that of `reference`, each of configurations of its own.

    Missing values are left out, configurations without one as well. Raises ValueError where a side has none.
    """
    ours, theirs = (_with_values(np.log(as_scores(rows))) for rows in (values, reference))
    return _ratio(
        tuned_estimate(ours, theirs), _mean(ours) - _mean(theirs), min(_num(ours), _num(theirs)), level
    )


def _with_values(logs: Array) -> Array:
    logs = logs[np.isfinite(logs).any(axis=1)]
    if not len(logs):
        raise ValueError("A ratio needs values on both sides, but one has none.")
    return logs


def _mean(logs: Array) -> float:
    return float(np.nanmean(logs, axis=1).mean())


def _num(logs: Array) -> int:
    return int(np.isfinite(logs).sum())


def _ratio(estimate: Estimate, mean: float, num_pairs: int, level: float) -> Ratio:
    low, high = (float(np.exp(bound)) for bound in estimate.interval(level))
    known = np.isfinite(high)
    return Ratio(float(np.exp(mean)), low if known else None, high if known else None, num_pairs)


def _skewed(t: Array, skewness: Array) -> Array:
    """The quantile of which Hall's transformation is `t`."""
    # nearer to 0, the difference of the cube root to 1 is lost to rounding
    some = np.abs(skewness) > 1e-5
    divisor = np.where(some, skewness, 1)
    return np.asarray(np.where(some, 3 / divisor * (np.cbrt(1 + divisor * (t - divisor / 6)) - 1), t))


def _satterthwaite(variance: Array, df: Array) -> Array:
    """Of the sum over the last axis; the sum of `df` where no variance was seen."""
    total = variance.sum(-1)
    some = total > 0
    share = variance / np.where(some, total, 1)[..., None]
    below = (share**2 / df).sum(-1)
    return np.asarray(np.where(some, 1 / np.where(below > 0, below, 1), df.sum(-1) + 0 * total))
