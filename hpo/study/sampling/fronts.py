"""Which trials come first where there are several objectives: fronts by non-dominated sorting.

Deb et al., "A Fast and Elitist Multiobjective Genetic Algorithm: NSGA-II", 2002.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpo.study.store.optuna_internals import non_domination_ranks


def loss_signs(directions: Sequence[str]) -> np.ndarray:
    """Factors that make lower better."""
    return np.array([-1.0 if direction == "maximize" else 1.0 for direction in directions])


def pareto_front(values: np.ndarray, directions: Sequence[str]) -> np.ndarray:
    """bool [N]: rows of `values` [N, K] that no other row equals or beats in all K and beats in one."""
    front: np.ndarray = non_domination_ranks(values * loss_signs(directions)) == 0
    return front


def order(losses_NK: np.ndarray) -> np.ndarray:
    """The indices of the rows, the best first: by front, then by the least of each objective and the
    distance."""
    if losses_NK.shape[1] == 1:
        return losses_NK[:, 0].argsort(kind="stable")
    ranks_N = non_domination_ranks(losses_NK)
    distance_N = np.empty(len(losses_NK))
    for rank in np.unique(ranks_N):
        distance_N[ranks_N == rank] = _crowding_distance(losses_NK[ranks_N == rank])
    return np.lexsort((losses_NK[:, 0], -distance_N, ranks_N))


def _crowding_distance(losses_NK: np.ndarray) -> np.ndarray:
    """How far apart the neighbours of each row are, summed over the objectives; infinite at the ends."""
    distance_N = np.zeros(len(losses_NK))
    for losses_N in losses_NK.T:
        by_loss_N = losses_N.argsort(kind="stable")
        gaps = np.diff(losses_N[by_loss_N]) / (np.ptp(losses_N) or 1.0)
        distance_N[by_loss_N] += np.concatenate([[np.inf], gaps]) + np.concatenate([gaps, [np.inf]])
    return distance_N
