"""Tables of curves: a pool of configurations, each with its losses after parts of its training.

A table is one of two:

    NAME.npz    `hyperparameters` [N, K] with their `names` [K], and `valid_loss` [N, P + 1] after 0 to P
                equal parts of training, not finite from where a run broke
    NAME.jsonl  what `tabulate_spaces.py` wrote, beside NAME.yaml, its study; the loss is the negative score
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from hpo.config.search_space import CategoricalDistribution, Distribution, FloatDistribution, SearchSpace
from hpo.config.study_config import load_study

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Curves:
    """A table."""

    space: SearchSpace
    params: Sequence[Settings]
    """Of each of the N runs."""
    shares: Sequence[Fraction]
    """Of the training, after which there are losses: the first 0, the last 1."""
    losses_NP: np.ndarray
    """After each share; NaN where the run has broken."""

    @property
    def points_NF(self) -> np.ndarray:
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
    return sorted([*folder.glob("*.npz"), *folder.glob("*.jsonl")])


def load(path: Path) -> Curves:
    return _load_jsonl(path) if path.suffix == ".jsonl" else _load_npz(path)


def points(params: Iterable[Settings], space: SearchSpace) -> np.ndarray:
    """Each setting from 0 to 1 over its range, on a log scale where it is searched on one [N, F].

    A categorical setting has a column for each choice; two that differ in it are as far apart as the ends of
    a range.
    """
    params = list(params)
    columns = [_columns([one[name] for one in params], space[name]) for name in space]
    return np.concatenate(columns, axis=1)


def _columns(values: Sequence[Any], distribution: Distribution) -> np.ndarray:
    if isinstance(distribution, CategoricalDistribution):
        return np.array([[value == choice for choice in distribution.choices] for value in values]) / 2**0.5
    scale = np.log if distribution.log else np.asarray
    low, high = scale(distribution.low), scale(distribution.high)
    column_N: np.ndarray = (scale(np.array(values)) - low) / (high - low)
    return column_N[:, None]


def _load_npz(path: Path) -> Curves:
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


def _load_jsonl(path: Path) -> Curves:
    study = load_study(path.with_suffix(".yaml"))
    _, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    shares = [Fraction(0), *study.evaluation.shares(study.training.epochs)]
    losses_NP = np.full((len(rows), len(shares)), np.nan)
    losses_NP[:, 0] = 0.0
    for row, losses_P in zip(rows, losses_NP, strict=True):
        scores = [score for *_, score in row["evaluations"]]
        losses_P[1 : len(scores) + 1] = np.negative(scores)
    return Curves(study.search_space, [row["params"] for row in rows], shares, losses_NP)
