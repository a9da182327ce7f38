"""Tables of curves: a pool of configurations, each with its losses after parts of its training.

A table is a file NAME.npz with `hyperparameters` [N, K], their `names` [K], and `valid_loss` [N, P + 1] after
0 to P equal parts of training. A loss is not finite from the part on in which the run broke.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from hpo.config.search_space import FloatDistribution

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Curves:
    """A table."""

    space: Mapping[str, FloatDistribution]
    params: Sequence[Settings]
    """Of each of the N runs."""
    shares: Sequence[Fraction]
    """Of the training, after which there are losses: the first 0, the last 1."""
    losses_NP: np.ndarray
    """After each share; NaN where the run has broken."""

    @property
    def points_NK(self) -> np.ndarray:
        """The settings as points, see `points`."""
        return points(self.params, self.space)

    @property
    def finals_N(self) -> np.ndarray:
        """NaN for a run that breaks."""
        return self.losses_NP[:, -1]

    def last(self, row: int) -> float:
        """The share of its training after which a run breaks; 1: it does not."""
        is_broken_P = np.isnan(self.losses_NP[row])
        return float(self.shares[is_broken_P.argmax()]) if is_broken_P.any() else 1.0

    def at(self, share: Fraction) -> Fraction:
        """This share of the training, or the next one after which there are losses."""
        return self.shares[bisect_left(self.shares, share)]

    def loss(self, row: int, share: Fraction) -> float:
        """After one of `shares`."""
        return float(self.losses_NP[row, self.shares.index(share)])

    def regret(self, loss: float | None) -> float:
        best, median = np.nanmin(self.finals_N), np.nanmedian(self.finals_N)
        return 1.0 if loss is None else float((loss - best) / (median - best))


def table_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.npz"))


def points(params: Sequence[Settings], space: Mapping[str, FloatDistribution]) -> np.ndarray:
    """Each setting from 0 to 1 over its range, on a log scale where it is searched on one [N, K]."""
    columns_KN = []
    for name, setting in space.items():
        scale = np.log if setting.log else np.asarray
        low, high = scale(setting.low), scale(setting.high)
        columns_KN.append((scale([one[name] for one in params]) - low) / (high - low))
    return np.stack(columns_KN, axis=1)


def load(path: Path) -> Curves:
    with np.load(path) as table:
        names, settings_NK = table["names"].tolist(), table["hyperparameters"].astype(float)
        losses_NP = table["valid_loss"].astype(float)
    is_log_K = (settings_NK > 0).all(axis=0)
    space = {
        name: FloatDistribution.model_validate(
            {"type": "float", "low": values_N.min(), "high": values_N.max(), "log": bool(is_log)}
        )
        for name, values_N, is_log in zip(names, settings_NK.T, is_log_K, strict=True)
    }
    params = [dict(zip(names, settings_K, strict=True)) for settings_K in settings_NK.tolist()]
    num_parts = losses_NP.shape[1] - 1
    shares = [Fraction(part, num_parts) for part in range(num_parts + 1)]
    is_finite_NP = np.isfinite(losses_NP).cumprod(axis=1).astype(bool)
    return Curves(space, params, shares, np.where(is_finite_NP, losses_NP, np.nan))
