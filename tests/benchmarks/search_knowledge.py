"""What earlier results save a search, and what they cost where they mislead, on tables of curves.

    python tests/benchmarks/search_knowledge.py FOLDER [--seeds 20] [--policy "no pruner"]

The tables, the compute and the regret are those of `search_tables.py`. Each is searched

- without: as there.
- portfolio: the four best configurations that the other tables know are tried first, at most a tenth of the
  trials: of the best two of each, one after the other that which lowers the mean least regret the most.
- wrong portfolio: the worst two of each of the other tables that do not break, the worst on average first.
- learn_from: 30 whole runs of a search of another table (of the five by the seed) are the prior, weight 1.
- misled: 30 whole runs of a search of the same table turned upside down are.
"""

from __future__ import annotations

import argparse
import math
import statistics
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from curves import Curves, Settings, load, table_paths
from optuna.trial import FrozenTrial, Trial
from search_tables import POLICIES, Policy, Search

from hpo.config.portfolio import PORTFOLIO, SHARE
from hpo.study.sampling.device_sampler import WrapperSampler
from hpo.study.sampling.earlier import SOURCE_ATTR
from hpo.study.sampling.learn_from import PriorSampler, earlier_trials

COMPUTE = (5, 10, 20)
"""Whole runs."""
NUM_EARLIER = 30
VARIANTS = ("without", "portfolio", "wrong portfolio", "learn_from", "misled")
PRIOR = "prior"


class KnowingSearch(Search):
    """A search that tries some configurations first, or has the trials of an earlier study."""

    def __init__(
        self,
        policy: Policy,
        curves: Curves,
        seed: int,
        first: Sequence[Settings] = (),
        earlier: Sequence[FrozenTrial] = (),
    ) -> None:
        super().__init__(policy, curves, seed)
        self.first = list(first)
        self.source: str | None = None
        if earlier:
            sampler = self.study.sampler
            assert isinstance(sampler, WrapperSampler)
            sampler.wrap_innermost(lambda inner: PriorSampler(inner, earlier, PRIOR, 1.0))

    def _propose(self) -> dict[str, Any]:
        if self.first:
            self.source = "portfolio"
            return dict(self.first.pop(0))
        params = super()._propose()
        self.source = self.study.get_trials(deepcopy=False)[-1].user_attrs.get(SOURCE_ATTR)
        return params

    def _train(self, trial: Trial, begin: float) -> None:
        if self.source and begin == 0:
            trial.set_user_attr(SOURCE_ATTR, self.source)
        super()._train(trial, begin)


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


def earlier_of(curves: Curves, searched: Curves, seed: int) -> list[FrozenTrial]:
    search = Search(POLICIES["no pruner"], curves, 1000 + seed)
    search.run(NUM_EARLIER)
    return earlier_trials(search.study, searched.space, seed)


def search(folder: Path, index: int, name: str, variant: str, case: tuple[int, int]) -> dict[str, float]:
    """The regret of one search, and how many of its trials were drawn with a prior."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    policy, (compute, seed) = POLICIES[name], case
    tables = _tables(folder)
    curves, others = tables[index], [*tables[:index], *tables[index + 1 :]]
    first: list[Settings] = []
    earlier: list[FrozenTrial] = []
    if "portfolio" in variant:
        num_trials = compute
        if promotion := policy.promotion:
            num_trials = next(n for n in count(1) if promotion.left([], (), num_new=n + 1) > compute)
        first = _portfolio(folder, index, variant == "portfolio")
        first = first[: min(len(PORTFOLIO), math.ceil(SHARE * num_trials))]
    elif variant == "learn_from":
        earlier = earlier_of(others[seed % len(others)], curves, seed)
    elif variant == "misled":
        earlier = earlier_of(replace(curves, losses_NP=-curves.losses_NP), curves, seed)
    one = KnowingSearch(policy, curves, seed, first, earlier)
    one.run(compute)
    until = compute if policy.promotion is None else math.inf
    drawn = [trial.user_attrs.get(SOURCE_ATTR) for trial in one.study.trials if trial.state.name != "FAIL"]
    return {"regret": one.regret_at(until), "with prior": drawn.count(PRIOR), "trials": len(drawn)}


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
    print("median table, worst table, [quarters of all searches]; trials drawn with the prior")
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


def _cell(ended: Sequence[Sequence[dict[str, float]]]) -> str:
    medians = [statistics.median(one["regret"] for one in table) for table in ended]
    low, _, high = statistics.quantiles((one["regret"] for table in ended for one in table), n=4)
    share = sum(one["with prior"] for table in ended for one in table) / sum(
        one["trials"] for table in ended for one in table
    )
    return f"{statistics.median(medians):.2f} {max(medians):.2f} [{low:.2f} {high:.2f}] {share:.0%}"


if __name__ == "__main__":
    main()
