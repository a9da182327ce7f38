"""How good a configuration a search finds at the compute of so many whole runs, on tables of curves.

    python tests/benchmarks/search_tables.py FOLDER [--seeds 100] [--policies NAME ...] [--json]

FOLDER has tables as `curves.py` describes them. A trial has an evaluation after each tenth of its training,
and at the rungs. Where a table has no losses there, the trial trains on to where there are, and its rung is
there. It costs what it trained, to where it paused, was stopped or broke; one that goes on costs the rest. A
whole run counts 1.

The tables are pools. A sampler proposes a point of the space that the table spans; the trial is the nearest
configuration that was not tried, and the sampler is shown that one's settings.

The regret is (found - best) / (median - best) of the final losses of the runs that do not break; found is the
least final loss of a run that has ended. Before the first has ended it is 1, as of a median configuration.
"""

import argparse
import json
import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from curves import Curves, load, points, table_paths
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import Trial, TrialState

from hpo.config.sampler_config import PrunerConfig, SamplerConfig
from hpo.config.search_space import SearchSpace, suggest
from hpo.config.sections import BUDGET_TRIALS, EvaluationConfig
from hpo.config.study_config import StudyConfig
from hpo.outcome import Outcome
from hpo.study.sampling.forecast import Cost, forecast
from hpo.study.sampling.promotion import (
    PAUSED_ATTR,
    RESUMED_ATTR,
    RUNGS_ATTR,
    Promotion,
    Standings,
    promotion_of,
)
from hpo.study.sampling.samplers import build_pruner, build_sampler

COMPUTE = (5, 10, 20, 40)
"""Whole runs."""
NUM_EVALUATIONS = 10
STUDY = {
    "name": "table",
    "objective": {"metric": "x/mae", "direction": "minimize"},
    "n_trials": 1,
    "data": {"source": "jsonl", "path": "x", "tasks": {"x": {"kind": "regression"}}},
    "evaluation": {"per_trial": NUM_EVALUATIONS},
    "search_space": {"learning_rate": {"type": "float", "low": 1e-5, "high": 1e-3}},
}
"""Any that names neither sampler nor pruner."""


@dataclass(frozen=True)
class Policy:
    """A way to search."""

    sampler: Callable[[SearchSpace, int], BaseSampler]
    pruner: Callable[[], BasePruner] = NopPruner
    promotion: Promotion | None = None
    """With it, a search of so much compute begins trials as long as enough is left for those that go on."""
    is_ours: bool = False
    """Whether a run that breaks is an infeasible one; else it FAILs."""


def ours(pruner: PrunerConfig, sampler: str = "tpe") -> Policy:
    promotion = promotion_of(pruner, ("minimize",), BUDGET_TRIALS)

    def build(space: SearchSpace, seed: int) -> BaseSampler:
        return build_sampler(SamplerConfig(name=sampler, seed=seed), space, explores=promotion is not None)

    return Policy(build, partial(build_pruner, pruner), promotion, is_ours=True)


def _plain(pruner: Callable[[], BasePruner]) -> Policy:
    return Policy(lambda _, seed: TPESampler(seed=seed), pruner)


POLICIES = {
    "default": ours(StudyConfig.model_validate(STUDY).pruner),
    "default, random": ours(StudyConfig.model_validate(STUDY).pruner, "random"),
    "asha": ours(PrunerConfig(name="asha", min_resource=3, reduction_factor=2)),
    "random, one tenth, then the best three": Policy(
        lambda _, seed: RandomSampler(seed=seed),
        promotion=Promotion((0.1,), 10**6, 3, directions=("minimize",), num_trials=BUDGET_TRIALS),
    ),
    # `optuna.create_study` without a pruner has this one, as `Trainer.hyperparameter_search`.
    "Optuna TPE, median": _plain(MedianPruner),
    "Optuna TPE, Hyperband": _plain(partial(HyperbandPruner, max_resource=NUM_EVALUATIONS)),
    "Optuna TPE, ASHA": _plain(SuccessiveHalvingPruner),
}


class Search:
    """One search of a table."""

    def __init__(self, policy: Policy, curves: Curves, seed: int) -> None:
        self.policy, self.curves = policy, curves
        self.study = optuna.create_study(sampler=policy.sampler(curves.space, seed), pruner=policy.pruner())
        self.left = np.ones(len(curves.params), dtype=bool)
        self.points_NK = curves.points_NK
        self.spent = 0.0
        self.ended: list[tuple[float, float]] = []
        """When a run had ended, and its loss."""
        self.row_of: dict[int, int] = {}
        self.paused: dict[int, Trial] = {}
        self.promotion = policy.promotion
        rungs: list[Fraction] = []
        if self.promotion:
            rungs = sorted({curves.at(Fraction(str(rung))) for rung in self.promotion.rungs})
            self.promotion = replace(self.promotion, rungs=tuple(map(float, rungs)))
            self.standings = Standings(self.promotion)
        shares = EvaluationConfig(per_trial=NUM_EVALUATIONS).shares(None)
        self.evaluate_at = sorted({*rungs, *map(curves.at, shares)})

    def regret_at(self, compute: float) -> float:
        losses = [loss for spent, loss in self.ended if spent <= compute + 1e-9]
        return self.curves.regret(min(losses, default=None))

    def run(self, compute: float) -> None:
        """Search until so many whole runs are paid for."""
        if self.promotion is None:
            while self.spent < compute and self.left.any():
                self._start()
            return
        standings = self.standings
        while True:
            trials = self.study.get_trials(deepcopy=False)
            rungs = standings.rungs([trials[number] for number in self.paused], lambda _: True)
            for number in standings.fallen_behind(rungs):
                self._end(self.paused.pop(number), Outcome.PRUNED)
            most, left = int(self.left.sum()), compute - self.spent
            may_begin = forecast(self.promotion, rungs, 0, most, Cost(0.0, 1.0), left).num_new > 0
            if promoted := standings.promoted(rungs, more_begin=may_begin):
                self._continue(promoted[0])
            elif may_begin:
                self._start()
            else:
                return

    def _start(self) -> None:
        """Begin a trial and run it until it ends or pauses."""
        row = self._nearest(self._propose())
        self.study.enqueue_trial(dict(self.curves.params[row]))
        trial = self.study.ask()
        suggest(self.curves.space, trial)
        self.row_of[trial.number] = row
        self._train(trial, 0.0)

    def _continue(self, number: int) -> None:
        trial = self.paused.pop(number)
        at = trial.user_attrs[PAUSED_ATTR]
        trial.set_user_attr(RESUMED_ATTR, at)
        self._train(trial, at)

    def _train(self, trial: Trial, begin: float) -> None:
        """Train a trial from this share of its training until it ends or pauses."""
        row, promotion, before = self.row_of[trial.number], self.promotion, self.spent
        for index, share in enumerate(self.evaluate_at, 1):
            if float(share) <= begin:
                continue
            loss = self.curves.loss(row, share)
            if math.isnan(loss):
                self.spent = before + self.curves.last(row) - begin
                self._end_broken(trial)
                return
            self.spent = before + float(share) - begin
            trial.report(loss, index)
            is_pruned = trial.should_prune()
            rung = promotion and promotion.pauses_at(float(share), begin)
            if rung:
                self._pause(trial, rung, loss)
                return
            if is_pruned and share < 1:
                self._end(trial, Outcome.PRUNED)
                return
        self.ended.append((self.spent, loss))
        self._end(trial, Outcome.COMPLETE, loss)

    def _pause(self, trial: Trial, rung: float, loss: float) -> None:
        """Leave the trial RUNNING at a rung, as a worker does."""
        at_rung = {"values": [loss], "constraints": {}}
        trial.set_user_attr(RUNGS_ATTR, {**trial.user_attrs.get(RUNGS_ATTR, {}), str(rung): at_rung})
        trial.set_user_attr(PAUSED_ATTR, rung)
        self.paused[trial.number] = trial

    def _end(self, trial: Trial, outcome: Outcome, loss: float | None = None) -> None:
        trial.set_user_attr("outcome", outcome)
        ended = self.study.tell(trial, loss, TrialState[outcome.optuna_state])
        if self.promotion:
            self.standings.add_ended(ended)

    def _end_broken(self, trial: Trial) -> None:
        if not self.policy.is_ours:
            self._end(trial, Outcome.FAILED)
            return
        trial.set_constraint("feasible", 1.0)
        self._end(trial, Outcome.NONFINITE)

    def _propose(self) -> dict[str, Any]:
        """What the sampler would try; the trial that asks it FAILs, which no sampler sees."""
        trial = self.study.ask()
        params = suggest(self.curves.space, trial)
        self.study.tell(trial, state=TrialState.FAIL)
        return params

    def _nearest(self, params: dict[str, Any]) -> int:
        distance_N = ((self.points_NK - points([params], self.curves.space)) ** 2).sum(axis=1)
        row = int(np.where(self.left, distance_N, np.inf).argmin())
        self.left[row] = False
        return row


def regrets(name: str, path: Path, seed: int) -> dict[int, float]:
    """The regret of a policy on a table at each of `COMPUTE`, with one seed."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    policy, curves = POLICIES[name], load(path)
    if policy.promotion is None:
        search = Search(policy, curves, seed)
        search.run(max(COMPUTE))
        return {compute: search.regret_at(compute) for compute in COMPUTE}
    found = {}
    for compute in COMPUTE:
        search = Search(policy, curves, seed)
        search.run(compute)
        found[compute] = search.regret_at(math.inf)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--json", action="store_true", help="print {policy: {table: {compute: median}}}")
    arguments = parser.parse_args()
    tables = table_paths(arguments.folder)
    if not tables:
        parser.error(f"there is no table (*.npz) in {arguments.folder}")
    result: dict[str, dict[str, dict[str, float]]] = {}
    with ProcessPoolExecutor() as pool:
        for name in arguments.policies:
            result[name] = {}
            for path in tables:
                of_seeds = list(pool.map(partial(regrets, name, path), range(arguments.seeds)))
                medians = {str(c): statistics.median(one[c] for one in of_seeds) for c in COMPUTE}
                result[name][path.stem] = medians
            if not arguments.json:
                print(_line(name, result[name]), flush=True)
    if arguments.json:
        print(json.dumps(result, indent=2))


def _line(name: str, of_tables: dict[str, dict[str, float]]) -> str:
    """Median and worst table at each compute."""
    cells = []
    for compute in map(str, COMPUTE):
        found: Sequence[float] = [medians[compute] for medians in of_tables.values()]
        cells.append(f"{statistics.median(found):.2f} {max(found):.2f}")
    return f"{name:40}" + "   ".join(cells)


if __name__ == "__main__":
    main()
