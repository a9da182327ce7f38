"""Which of a study's best configurations is really the best? A race on new seeds that drops the beaten.

All configurations run on the same new seeds, which are the blocks. At each look of the `Plan` every one is
compared with every other by a paired t test, as in the race of irace (Lopez-Ibanez et al. 2016) with its t
test, and is dropped when another beats it at the level of this look for alpha / (K - 1). The truly best can
be dropped only by one of the K - 1 tests against it, so over the whole race that happens with a probability
of at most alpha; the levels of `hpo.compare.sequential` hold this for Gaussian differences, whatever
their variances. The race ends when one is left, or with `max_seeds`: then the best are too close to call.

Probability of being the best: a score is configuration + seed + Gaussian noise, with least squares for the
cells that a dropped configuration lacks, and the configurations' means come from a normal distribution whose
standard deviation in units of the noise has a half-Cauchy prior (Gelman, Bayesian Analysis 2006); the noise's
variance has Jeffreys' prior. The spread is inferred because a search returns its best configurations, which
are nearly equal, and a flat prior would be too sure of their order. The scores of the search do not count:
they belong to the winner's luck.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpo.compare.estimate import Array, as_scores, paired_estimate
from hpo.compare.sequential import Plan
from hpo.compare.verdict import paired_failures

Mask = NDArray[np.bool_]

_NUM_SPREADS = 200
_NUM_DRAWS = 20_000


@dataclass(frozen=True)
class Standing:
    """One configuration of a race."""

    configuration: int
    """Its key: the number of its trial in the search."""
    num_seeds: int
    """New seeds that count for it."""
    num_failed: int
    """Its trials on them that ended without a score."""
    mean: float
    """Of its scores on new seeds, in points; NaN without one."""
    dropped_after: int | None
    """Seeds after which it was dropped; None while it is in the race."""
    probability_best: float
    """0 for one that was dropped because it fails more often than another."""
    overstated: float
    """Score in the search minus the mean on new seeds, in points: selection bias."""
    overstated_low: float
    overstated_high: float
    """An interval that holds at whichever look the race stopped, with a one-sided error of alpha for each
    bound and configuration; infinite with fewer than two scores."""


@dataclass(frozen=True)
class Race:
    """Where a race stands; the standings begin with the best."""

    standings: tuple[Standing, ...]
    best: int | None
    """The configuration in the race with the highest mean; None before the first look, or if none trained."""
    too_close: tuple[int, ...]
    """Configurations that cannot be told from the best, after the last look; else empty."""
    next_look: int | None
    """How many new seeds each configuration in the race must have next; None when it is over."""

    def as_json(self) -> dict[str, Any]:
        standings = [asdict(standing) for standing in self.standings]
        return {"standings": standings, "best": self.best, "too_close": self.too_close}

    @property
    def running(self) -> tuple[int, ...]:
        return tuple(standing.configuration for standing in self.standings if standing.dropped_after is None)


def run_race(
    scores: Mapping[int, Sequence[float | None]],
    search_scores: Mapping[int, float],
    plan: Plan,
    repeated: Mapping[int, Sequence[float | None]] | None = None,
) -> Race:
    """The race as far as the scores reach; it is run again from its start each time and says the same.

    Args:
        scores: of each configuration, in the order of the new seeds, higher is better; None or NaN where the
            trial ended without one. A configuration that was dropped needs no more.
        search_scores: what the search said of each, of the same metric.
        plan: its `num_comparisons` and `margin` do not count here.
        repeated: the scores of the same trials on the split that the search has used, by which it is known
            how much it overstated; left out, that is the split of `scores`.
    """
    names = tuple(scores)
    plan = replace(plan, num_comparisons=1)
    levels = replace(plan, num_comparisons=max(len(names) - 1, 1)).levels
    dropped_after = np.zeros(len(names), dtype=int)
    counted = np.zeros(len(names), dtype=int)
    failing = np.zeros(len(names), dtype=bool)
    next_look: int | None = plan.looks[0]
    for look, level in zip(plan.looks, levels, strict=True):
        running = dropped_after == 0
        if any(len(scores[name]) < look for name, runs in zip(names, running, strict=True) if runs):
            break
        counted[running] = look
        values = _values(scores, counted)
        failing |= _fails_more(values, running, level)
        left = survivors(values, running & ~failing, level)
        dropped_after[running & ~left] = look
        next_look = plan.next_look(look) if left.sum() > 1 else None
        if next_look is None:
            break
    values = _values(scores, counted)
    chances = probabilities_best(np.where(failing[:, None], np.nan, values))
    again = values if repeated is None else _values(repeated, counted)
    standings = [
        _standing(name, row[:num], search_scores[name] - same[:num], int(dropped), chance, plan)
        for name, row, same, num, dropped, chance in zip(
            names, values, again, counted, dropped_after, chances, strict=True
        )
    ]
    standings.sort(key=lambda one: (one.dropped_after is not None, -np.nan_to_num(one.mean, nan=-np.inf)))
    in_race = tuple(one.configuration for one in standings if one.dropped_after is None)
    known = bool(counted.any()) and bool(np.isfinite(standings[0].mean))
    too_close = in_race if known and next_look is None and len(in_race) > 1 else ()
    return Race(tuple(standings), in_race[0] if known else None, too_close, next_look)


def survivors(values: Array, running: Mask, level: float) -> Mask:
    """Those in the race that no other beats. Values [..., configurations, seeds], running without seeds.

    Where scores are missing, three may beat each other in turn: then all stay.
    """
    values = np.where(running[..., None], values, np.nan)
    differences = values[..., :, None, :] - values[..., None, :, :]
    beats = paired_estimate(differences[..., None, :]).interval(level)[0] > 0
    left = running & ~beats.any(-2)
    return np.where(left.any(-1, keepdims=True), left, running)


def _fails_more(values: Array, running: Mask, level: float) -> Mask:
    """Those in the race that are proved to fail more often than another, as in `hpo.compare.verdict`."""
    result = np.zeros_like(running)
    for one, other in np.argwhere(running[:, None] & running):
        failures = paired_failures(values[one], values[other])
        result[one] |= failures.more_than_reference and failures.p_value <= level
    return result


def probabilities_best(values: Array, num_draws: int = _NUM_DRAWS) -> Array:
    """How probable it is that each configuration has the highest mean. Values [configurations, seeds]."""
    trained = np.isfinite(values).any(axis=1)
    result = np.zeros(len(values))
    if not trained.any():
        return result + 1 / len(values)
    values = values[trained]
    there = np.isfinite(values)
    values, there = values[:, there.any(axis=0)], there[:, there.any(axis=0)]
    centred = np.where(there, values - np.nanmean(values, axis=0), 0.0)
    # the seeds are eliminated from the normal equations; their eigenvectors make the contrasts independent
    precision = np.diag(there.sum(axis=1)) - there / there.sum(axis=0) @ there.T
    precisions, basis = np.linalg.eigh(precision)
    known = precisions > 1e-9
    precisions, basis = precisions[known], basis[:, known]
    contrasts = basis.T @ centred.sum(axis=1) / precisions
    residual = max(float((centred**2).sum() - (precisions * contrasts**2).sum()), 0.0)
    if residual + (contrasts**2).sum() < 1e-18:
        result[trained] = 1 / trained.sum()
        return result
    df = there.sum() - there.shape[1]
    # quantiles of the half-Cauchy prior; beside each the marginal likelihood
    spread = np.tan((np.arange(_NUM_SPREADS) + 0.5) / _NUM_SPREADS * np.pi / 2)[:, None] ** 2
    variances = spread + 1 / precisions
    squares = residual + (contrasts**2 / variances).sum(axis=1)
    log_weights = -0.5 * np.log(variances).sum(axis=1) - 0.5 * df * np.log(squares)
    weights = np.exp(log_weights - log_weights.max())
    draws = np.random.default_rng(0)
    drawn = draws.choice(_NUM_SPREADS, num_draws, p=weights / weights.sum())
    noise = squares[drawn] / draws.chisquare(df, num_draws)
    shrink = (spread * precisions / (1 + spread * precisions))[drawn]
    deviation = np.sqrt(noise[:, None] * shrink / precisions)
    effects = shrink * contrasts + deviation * draws.standard_normal(shrink.shape)
    best = (effects @ basis.T).argmax(axis=1)
    result[trained] = np.bincount(best, minlength=len(values)) / num_draws
    return result


def _values(scores: Mapping[int, Sequence[float | None]], counted: NDArray[np.int_]) -> Array:
    """[configurations, seeds] with NaN from the seed on that does not count."""
    values = np.full((len(counted), counted.max()), np.nan)
    for row, num, given in zip(values, counted, scores.values(), strict=True):
        row[:num] = as_scores([given], num)[0]
    return values


def _standing(
    configuration: int, values: Array, overstated: Array, dropped_after: int, chance: float, plan: Plan
) -> Standing:
    """`overstated` is the search's score minus that of each new seed."""
    there, over = (found[np.isfinite(found)] for found in (values, overstated))
    mean, excess = (float(found.mean()) if len(found) else np.nan for found in (there, over))
    levels = dict(zip(plan.looks, plan.levels, strict=True))
    low, high = paired_estimate(overstated[None]).interval(levels.get(len(values), plan.alpha))
    return Standing(
        configuration=configuration,
        num_seeds=len(values),
        num_failed=len(values) - len(there),
        mean=mean,
        dropped_after=dropped_after or None,
        probability_best=float(chance),
        overstated=excess,
        overstated_low=float(low),
        overstated_high=float(high),
    )
