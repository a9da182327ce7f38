"""When a comparison looks at its data, and how much error each look may spend.

A comparison adds seeds until it is decided, so it tests the same hypothesis several times. Each side of an
interval has an error alpha, which its looks spend (error spending, Lan & DeMets, Biometrika 1983): up to n
seeds (1 - RESERVE) alpha (n / max_seeds)^2, the power family of Kim & DeMets (Biometrika 1987), which leaves
most of it to the last looks, where skewed scores do the least harm. The intervals at the looks hold together
(repeated confidence intervals, Jennison & Turnbull, JRSS B 1989), whatever made the comparison stop.

A comparison that `max_seeds` did not decide may be extended, again and again: its looks keep their levels,
and the reserve pays for those after them, up to n seeds RESERVE alpha (1 - max_seeds / n). What is spent
depends on the number of seeds alone, so it is all the same when an extension was decided on, how often and
how far. Its limits: it decides later than a plan for as many seeds would have (at 20 seeds its one-sided
level is 0.007 after a plan for 12, and 0.036 in a plan for 20); and levels are exact for looks that do not
depend on the data. The looks of an extension are those in `LOOKS`, whoever asks for it and why; an end that
is not among them is one look more, and if its place was chosen by the scores seen, the error is what is
stated only nearly (Lan & DeMets, Biometrics 1989).

The levels are exact for Gaussian differences of unknown variance, from three seeds on, and no approximation
by Brownian motion is needed. With n values of mean zero, let r be the cosine between them and (1, ..., 1):
t = r sqrt(n - 1) / sqrt(1 - r^2). The path of r is independent of the sum of squares (Basu's theorem), so r
is a Markov chain: r' = r sqrt(n / (n + 1)) cos(psi) + sin(psi) / sqrt(n + 1), where psi in (-pi/2, pi/2) has
a density proportional to cos(psi)^(n - 1). `nominal_levels` follows its distribution on a grid and finds at
each look the bound that spends what may be spent (the recursion of Armitage, McPherson & Rowe, JRSS A 1969,
for the t statistic). For estimates with Satterthwaite's degrees of freedom the levels are those of the case
with the fewest, where one configuration has all the variance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr

from hpo.config.comparison import MOST_SEEDS

LOOKS = (3, 5, 8, 12, 20, 32, 50, 80, 125, MOST_SEEDS)
"""Numbers of seeds after which a comparison looks: about 1.6 times as many each time."""
RESERVE = 0.1
"""Share of the error that is kept for an extension beyond `max_seeds`."""
_NUM_CELLS = 4000
_NUM_ANGLES = 96


@dataclass(frozen=True)
class Plan:
    """How a comparison is decided; fixed before its first seed."""

    margin: float = 0.5
    """What a precision may lose and still be as good, in the unit of the scores; NaN: there is no verdict."""
    min_seeds: int = 3
    max_seeds: int = 20
    """Seeds by which all of the error but the reserve is spent."""
    alpha: float = 0.05
    """One-sided error for each side of the intervals, over all looks and comparisons: the intervals of a
    comparison hold together with a probability of at least 1 - 2 alpha."""
    num_comparisons: int = 1
    """Of the family that shares `alpha`: precisions times questions (Bonferroni's correction: unlike Holm's
    it has intervals that hold for all comparisons together, and the verdicts can be read from them)."""
    extensions: tuple[int, ...] = ()
    """More seeds than `max_seeds`, ascending, each number decided on after that before it did not suffice."""

    def __post_init__(self) -> None:
        if not 3 <= self.min_seeds <= self.max_seeds <= LOOKS[-1]:
            raise ValueError(
                f"3 <= min_seeds <= max_seeds <= {LOOKS[-1]} must hold, but got (min_seeds={self.min_seeds}, "
                f"max_seeds={self.max_seeds})."
            )
        steps = (self.max_seeds, *self.extensions)
        if any(one >= other for one, other in pairwise(steps)) or steps[-1] > LOOKS[-1]:
            raise ValueError(
                f"max_seeds < extensions <= {LOOKS[-1]} must hold, ascending, but got "
                f"(max_seeds={self.max_seeds}, extensions={self.extensions})."
            )

    @property
    def looks(self) -> tuple[int, ...]:
        """Numbers of seeds, ascending."""
        ends = (self.max_seeds, *self.extensions)
        between = (num for num in LOOKS if self.min_seeds < num < ends[-1])
        return tuple(sorted({self.min_seeds, *between, *ends}))

    @property
    def levels(self) -> tuple[float, ...]:
        """The one-sided level of the t interval at each look."""
        return nominal_levels(self.looks, tuple(self.spent(num) for num in self.looks))

    def spent(self, num_seeds: int) -> float:
        """The one-sided error that looks up to this number of seeds may spend in one comparison."""
        alpha = self.alpha / self.num_comparisons
        planned = (1 - RESERVE) * alpha * min(num_seeds / self.max_seeds, 1) ** 2
        return planned + RESERVE * alpha * max(1 - self.max_seeds / num_seeds, 0)

    def next_look(self, num_seeds: int) -> int | None:
        """How many seeds the next look needs; None after the last."""
        return next((num for num in self.looks if num > num_seeds), None)


@lru_cache
def nominal_levels(looks: tuple[int, ...], spent: tuple[float, ...]) -> tuple[float, ...]:
    """One-sided levels of t intervals after `looks` values, so that up to each look any of them misses with
    the probability in `spent`."""
    edges = np.linspace(-math.pi / 2, math.pi / 2, _NUM_CELLS + 1)
    cosine = np.sin((edges[1:] + edges[:-1]) / 2)
    num = looks[0]
    # the angle of a direction drawn at random in n dimensions has the density cos^(n - 2)
    mass = np.cos(np.arcsin(cosine)) ** (num - 2)
    mass /= mass.sum()
    levels, before = [], 0.0
    for look, now in zip(looks, spent, strict=True):
        while num < look:
            mass = _add_value(mass, cosine, num)
            num += 1
        # mass[i:] lies above edges[i]
        above = np.append(np.cumsum(mass[::-1])[::-1], 0.0)
        bound = float(np.interp(before - now, -above, edges))
        mass = np.where(edges[1:] <= bound, mass, mass * np.clip((bound - edges[:-1]) / np.diff(edges), 0, 1))
        levels.append(float(stdtr(num - 1, -math.tan(bound) * math.sqrt(num - 1))))
        before = now
    return tuple(levels)


def _add_value(mass: NDArray[np.float64], cosine: NDArray[np.float64], num: int) -> NDArray[np.float64]:
    """The distribution of the angle after one more value, from that after `num`."""
    nodes, weights = np.polynomial.legendre.leggauss(_NUM_ANGLES)
    psi = nodes * math.pi / 2
    weights = weights * np.cos(psi) ** (num - 1)
    moved = (math.sqrt(num) * np.outer(cosine, np.cos(psi)) + np.sin(psi)) / math.sqrt(num + 1)
    # between the centres of two cells, mass is shared by distance
    place = (np.arcsin(moved.clip(-1, 1)) / math.pi + 0.5) * _NUM_CELLS - 0.5
    place = place.clip(0, _NUM_CELLS - 1.001)
    cell = place.astype(np.intp)
    share = np.outer(mass, weights / weights.sum())
    upper = share * (place - cell)
    result = np.bincount(cell.ravel(), (share - upper).ravel(), _NUM_CELLS)
    return np.asarray(result + np.bincount(cell.ravel() + 1, upper.ravel(), _NUM_CELLS))
