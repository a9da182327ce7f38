"""How good a front a search with two objectives finds, on tables of curves: `promote` against no pruning.

    python tests/benchmarks/search_fronts.py FOLDER [--seeds 8] [--second learning_rate] [--peer FOLDER]

Tables, compute and the search are those of `search_tables.py`. The first objective is the final `valid_loss`.
The second is either a setting, scaled to its range, of which less is better: known from the start, as what a
model costs is (the tables have no such column); or `test_loss`, which is known at the end only.

A front's hypervolume is that between it and the median loss (and the greatest value of a setting, or the
median of `test_loss`), as a share of that of the whole table's front. A trial is lost that was begun, would
be on the front of all that were begun, and did not end.

`--peer` is the folder `package/pruners` of https://github.com/optuna/optunahub-registry: its
`multi_metric_pruner` is compared too, around Optuna's `MedianPruner`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from curves import Curves, load, table_paths
from optuna.pruners import MedianPruner
from optuna.samplers import TPESampler
from optuna.trial import Trial
from search_tables import Policy, Search, ours

from hpo.config.sampler_config import PrunerConfig
from hpo.outcome import Outcome
from hpo.study.sampling.fronts import pareto_front

COMPUTE = (10, 20)
"""Whole runs."""
METRICS, DIRECTIONS = ("first", "second"), ("minimize", "minimize")


def _peer() -> Any:
    pruner = import_module("multi_metric_pruner").MultiMetricPruner
    # Around `SuccessiveHalvingPruner` and `HyperbandPruner` it raises KeyError (at ee68019).
    return pruner(MedianPruner(), metric_directions=dict(zip(METRICS, DIRECTIONS, strict=True)), joint=True)


POLICIES = {
    "promote, the default": ours(PrunerConfig(name="promote"), directions=DIRECTIONS),
    "no pruner": ours(PrunerConfig(name="none")),
}
PEERS = {"multi_metric_pruner, MedianPruner": Policy(lambda _, seed: TPESampler(seed=seed), _peer)}


def second_losses(path: Path, curves: Curves, second: str) -> np.ndarray:
    """Of each run after each part of its training, the second objective [N, P + 1]."""
    if second in curves.space:
        setting_N1 = curves.points_NK[:, [list(curves.space).index(second)]]
        return np.broadcast_to(setting_N1, curves.losses_NP.shape)
    with np.load(path) as table:
        return np.where(np.isnan(curves.losses_NP), np.nan, table[second].astype(float))


class FrontSearch(Search):
    """One search of a table with two objectives."""

    directions = DIRECTIONS

    def __init__(self, policy: Policy, curves: Curves, seed: int, second_NP: np.ndarray) -> None:
        super().__init__(policy, curves, seed)
        self.second_NP = second_NP
        self.found: list[tuple[float, int]] = []
        """When a run had ended, and its row."""
        finals_N2 = np.stack([curves.finals_N, second_NP[:, -1]], axis=1)
        worst_2 = np.nanmedian(finals_N2, axis=0)
        if (second_NP == second_NP[:, :1]).all():
            worst_2[1] = 1.0
        self.gains_N2 = np.maximum(0.0, worst_2 - np.where(np.isnan(finals_N2), np.inf, finals_N2))

    def hypervolume_at(self, compute: float) -> float:
        rows = [row for spent, row in self.found if spent <= compute + 1e-9]
        return hypervolume(self.gains_N2[rows]) / hypervolume(self.gains_N2)

    def lost_at(self, compute: float) -> tuple[int, int]:
        """How many of the trials that were begun and would be on the front did not end, and how many are."""
        begun = [row for row in dict.fromkeys(self.row_of.values()) if self.gains_N2[row].prod() > 0]
        ended = {row for spent, row in self.found if spent <= compute + 1e-9}
        front = np.flatnonzero(pareto_front(-self.gains_N2[begun].reshape(-1, 2), DIRECTIONS))
        return sum(begun[index] not in ended for index in front), len(front)

    def _report(self, trial: Trial, loss: float, index: int) -> bool:
        share = self.evaluate_at[index - 1]
        part = math.ceil(share * (self.second_NP.shape[1] - 1))
        self.values = [loss, float(self.second_NP[self.row_of[trial.number], part])]
        if self.policy.is_ours:
            return False
        told = import_module("multi_metric_pruner").MultiMetricPrunerTrial(trial)
        told.report(dict(zip(METRICS, self.values, strict=True)), index)
        return bool(told.should_prune())

    def _values(self, _: float) -> list[float]:
        return self.values

    def _end(self, trial: Trial, outcome: Outcome, loss: float | None = None) -> None:
        if loss is not None:
            self.found.append((self.spent, self.row_of[trial.number]))
        super()._end(trial, outcome, loss)


def hypervolume(gains_N2: np.ndarray) -> float:
    """Of the points and the origin, more being better."""
    area = height = 0.0
    for width, high in sorted(map(tuple, gains_N2), reverse=True):
        area += width * max(0.0, high - height)
        height = max(height, high)
    return area


def searched(name: str, path: Path, second: str, seed: int) -> list[tuple[float, tuple[int, int]]]:
    """At each of `COMPUTE` the hypervolume's share, how many of the front are lost, and of how many."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    policy, curves = (POLICIES | PEERS)[name], load(path)
    found = []
    for compute in COMPUTE:
        search = FrontSearch(policy, curves, seed, second_losses(path, curves, second))
        search.run(compute)
        found.append((search.hypervolume_at(compute), search.lost_at(compute)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--second", default="learning_rate", help="a setting, or `test_loss`")
    parser.add_argument("--peer", type=Path)
    arguments = parser.parse_args()
    tables = table_paths(arguments.folder)
    if not tables:
        parser.error(f"there is no table (*.npz) in {arguments.folder}")
    if arguments.peer:
        sys.path.insert(0, str(arguments.peer))
    with ProcessPoolExecutor() as pool:
        for name in [*POLICIES, *(PEERS if arguments.peer else ())]:
            of_tables = [
                list(pool.map(partial(searched, name, path, arguments.second), range(arguments.seeds)))
                for path in tables
            ]
            print(_line(name, of_tables), flush=True)


def _line(name: str, of_tables: list[list[list[tuple[float, tuple[int, int]]]]]) -> str:
    """At each compute the median over the tables' medians, the worst table, and the share that is lost."""
    cells = []
    for index in range(len(COMPUTE)):
        at = [[of_seed[index] for of_seed in of_seeds] for of_seeds in of_tables]
        medians = [statistics.median(share for share, _ in of_seeds) for of_seeds in at]
        lost, fronts = np.sum([counts for of_seeds in at for _, counts in of_seeds], axis=0)
        said = f"{statistics.median(medians):.2f} {min(medians):.2f}"
        cells.append(f"{said} lost {lost / max(1, fronts):4.0%} of {fronts}")
    return f"{name:48}" + "   ".join(cells)


if __name__ == "__main__":
    main()
