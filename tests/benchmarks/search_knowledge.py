"""What configurations of earlier results save a search that tries them first, on tables of curves.

    python tests/benchmarks/search_knowledge.py FOLDER [--seeds 20] [--policy "no pruner"]

The tables, the compute and the regret are those of `search_tables.py`. Each is searched

- without: as there.
- portfolio: the four best configurations that the other tables know are tried first, at most a tenth of the
  trials: of the best two of each, one after the other that which lowers the mean least regret the most.
- wrong portfolio: the worst two of each of the other tables that do not break, the worst on average first.
"""

from __future__ import annotations

import argparse
import math
import statistics
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from curves import Curves, Settings, load, table_paths
from search_tables import POLICIES, Policy, Search

from hpo.config.portfolio import PORTFOLIO, SHARE

COMPUTE = (5, 10, 20)
"""Whole runs."""
VARIANTS = ("without", "portfolio", "wrong portfolio")


class KnowingSearch(Search):
    """A search that tries some configurations first."""

    def __init__(self, policy: Policy, curves: Curves, seed: int, first: Sequence[Settings] = ()) -> None:
        super().__init__(policy, curves, seed)
        self.first = list(first)

    def _propose(self) -> dict[str, Any]:
        return dict(self.first.pop(0)) if self.first else super()._propose()


def portfolio_of(others: Sequence[Curves], *, best: bool) -> list[Settings]:
    """The best two configurations of each table, or the worst two, ranked, the first of all of them first."""
    candidates: list[Settings] = []
    for curves in others:
        order = np.argsort(curves.finals_N)[: int(np.isfinite(curves.finals_N).sum())]
        candidates += [curves.params[row] for row in (order[:2] if best else order[-2:])]
    regret_CT = np.array([[_regret_near(curves, one) for curves in others] for one in candidates])
    if not best:
        return [candidates[index] for index in regret_CT.mean(axis=1).argsort()[::-1]]
    chosen: list[int] = []
    so_far_T = np.full(len(others), np.inf)
    while len(chosen) < len(candidates):
        left = [index for index in range(len(candidates)) if index not in chosen]
        chosen.append(min(left, key=lambda index: np.minimum(so_far_T, regret_CT[index]).mean()))
        so_far_T = np.minimum(so_far_T, regret_CT[chosen[-1]])
    return [candidates[index] for index in chosen]


def _regret_near(curves: Curves, settings: Settings) -> float:
    """The regret of the nearest configuration, at most 2; of one that breaks 2."""
    search = Search(POLICIES["random"], curves, 0)
    loss = curves.finals_N[search._nearest(dict(settings))]
    return 2.0 if math.isnan(loss) else min(2.0, curves.regret(loss))


@cache
def _tables(folder: Path) -> tuple[Curves, ...]:
    return tuple(map(load, table_paths(folder)))


@cache
def _portfolio(folder: Path, index: int, best: bool) -> list[Settings]:
    tables = _tables(folder)
    return portfolio_of([*tables[:index], *tables[index + 1 :]], best=best)


def search(folder: Path, index: int, name: str, variant: str, case: tuple[int, int]) -> float:
    """The regret of one search."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    policy, (compute, seed) = POLICIES[name], case
    first: list[Settings] = []
    if "portfolio" in variant:
        num_trials = compute
        if promotion := policy.promotion:
            num_trials = next(n for n in count(1) if promotion.left([], (), num_new=n + 1) > compute)
        first = _portfolio(folder, index, variant == "portfolio")
        first = first[: min(len(PORTFOLIO), math.ceil(SHARE * num_trials))]
    one = KnowingSearch(policy, _tables(folder)[index], seed, first)
    one.run(compute)
    return one.regret_at(compute if policy.promotion is None else math.inf)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--policy", choices=list(POLICIES), default="no pruner")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--compute", nargs="+", type=int, default=COMPUTE)
    arguments = parser.parse_args()
    num_tables = len(_tables(arguments.folder))
    if num_tables < 2:
        parser.error(f"there must be two tables in {arguments.folder}")
    print("median table, worst table, [quarters of all searches]")
    with ProcessPoolExecutor() as pool:
        for variant in arguments.variants:
            cells = []
            for compute in arguments.compute:
                cases = [(compute, seed) for seed in range(arguments.seeds)]
                ended = [
                    list(pool.map(partial(search, arguments.folder, index, arguments.policy, variant), cases))
                    for index in range(num_tables)
                ]
                cells.append(_cell(ended))
            print(f"{variant:16}" + "   ".join(cells), flush=True)


def _cell(regrets: Sequence[Sequence[float]]) -> str:
    medians = [statistics.median(table) for table in regrets]
    low, _, high = statistics.quantiles((regret for table in regrets for regret in table), n=4)
    return f"{statistics.median(medians):.2f} {max(medians):.2f} [{low:.2f} {high:.2f}]"


if __name__ == "__main__":
    main()
