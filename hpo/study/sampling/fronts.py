"""Rank trials of several objectives by non-dominated sorting.

Deb et al., "A Fast and Elitist Multiobjective Genetic Algorithm: NSGA-II", 2002.
"""

from collections.abc import Sequence

import numpy as np

from hpo.study.store.optuna_internals import non_domination_ranks


def loss_signs(directions: Sequence[str]) -> np.ndarray:
    return np.array([-1.0 if direction == "maximize" else 1.0 for direction in directions])


def pareto_front(values: np.ndarray, directions: Sequence[str]) -> np.ndarray:
    """Return a mask [N] of the rows of `values` [N, K] on the Pareto front."""
    front: np.ndarray = non_domination_ranks(values * loss_signs(directions)) == 0
    return front


def order(losses_NK: np.ndarray) -> np.ndarray:
    """Return the indices of the rows, the best first: by front, then by distance to the neighbours.

    There are at least two objectives.
    """
    ranks_N = non_domination_ranks(losses_NK)
    distance_N = np.empty(len(losses_NK))
    for rank in np.unique(ranks_N):
        distance_N[ranks_N == rank] = _crowding_distance(losses_NK[ranks_N == rank])
    return np.lexsort((losses_NK[:, 0], -distance_N, ranks_N))


def _crowding_distance(losses_NK: np.ndarray) -> np.ndarray:
    """Return the distance of each row's neighbours, summed over the objectives; infinite at the ends."""
    distance_N = np.zeros(len(losses_NK))
    for losses_N in losses_NK.T:
        by_loss_N = losses_N.argsort(kind="stable")
        gaps = np.diff(losses_N[by_loss_N]) / (np.ptp(losses_N) or 1.0)
        distance_N[by_loss_N] += np.concatenate([[np.inf], gaps]) + np.concatenate([gaps, [np.inf]])
    return distance_N
