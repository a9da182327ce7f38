"""Seconds until a search has found 99 % of the best score: ours against other samplers and pruners.

    python tests/benchmarks/search_speed.py tabulate     run every configuration
    python tests/benchmarks/search_speed.py replay       search the tables, 20 seeds each

The spaces and their tables are in `tests/benchmarks/spaces/`. To tabulate takes the better part of an hour
and wants a core of its own: `OMP_NUM_THREADS=1 taskset -c 1 python ...`. A replay takes minutes.

A replayed trial asks the sampler for its values, looks up the row that stands for them, reports its scores
and asks the pruner, and costs what the row cost up to where it ended. What is measured is the sum of these
costs until a trial completes whose score is at least `TARGET` of the best in the table. The time that the
sampler itself takes is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import optuna
from optuna.pruners import BasePruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import Trial, TrialState
from search_table import Row, Table, load_table, table_names, tabulate

from hpo.config.sampler_config import PrunerConfig
from hpo.config.search_space import suggest
from hpo.outcome import Outcome
from hpo.study.sampling.samplers import build_pruner, build_sampler

TARGET = 0.99
MAX_TRIALS = 300

Search = Callable[[Table, int], tuple[BaseSampler, BasePruner]]
"""The sampler and the pruner with which a contender searches the space of a table, for a seed."""


@dataclass(frozen=True)
class Contender:
    """A way to search."""

    name: str
    search: Search
    infeasible: Literal["constraint", "fail"] = "fail"
    """What Optuna is told of a trial that could not run: a violated constraint, or that it failed."""
    reported_step: Literal["index", "step"] = "index"
    """Evaluations are reported to the pruner by their number, or by the optimiser steps before them."""
    value: Literal["best", "last"] = "best"
    """Which evaluation's score is the trial's value."""


@dataclass(frozen=True)
class Replay:
    """One search by one contender."""

    seconds: float
    """Until the target was reached; without that, of all the trials."""
    reached: bool
    num_trials: int
    num_pruned: int
    num_repeats: int
    """Trials whose configuration an earlier trial of the search had."""


def of_study(table: Table, seed: int) -> tuple[BaseSampler, BasePruner]:
    """This package as its workers search a study file that names `asha` and no sampler.

    With `promote`, the default, nothing completes before all has begun: see `search_tables.py`.
    """
    study = table.study
    seeded = study.sampler.model_copy(update={"seed": seed})
    pruner = PrunerConfig(name="asha", min_resource=3, reduction_factor=2)
    return build_sampler(seeded, study.search_space), build_pruner(pruner)


OURS = Contender("ours", of_study, infeasible="constraint")
PLAIN_TPE = Contender("plain TPE", lambda _, seed: (TPESampler(seed=seed), NopPruner()))
RANDOM = Contender("random", lambda _, seed: (RandomSampler(seed=seed), NopPruner()))
TRAINER = Contender(
    # `optuna.create_study` without sampler and pruner; `Trainer` reports its global step at each evaluation
    # and returns the objective of the last one.
    "Trainer",
    lambda _, seed: (TPESampler(seed=seed), MedianPruner()),
    reported_step="step",
    value="last",
)
CONTENDERS = (OURS, PLAIN_TPE, TRAINER, RANDOM)


def replay(contender: Contender, table: Table, seed: int, *, max_trials: int = MAX_TRIALS) -> Replay:
    """Search the space of `table` until the target is reached, or for `max_trials`."""
    sampler, pruner = contender.search(table, seed)
    direction = table.study.objective[0].direction
    study = optuna.create_study(direction=direction, sampler=sampler, pruner=pruner)
    target = TARGET * table.best_score
    seconds, num_pruned = 0.0, 0
    had: Counter[str] = Counter()
    for number in range(1, max_trials + 1):
        trial = study.ask()
        row = table.row(suggest(table.study.search_space, trial))
        had[str(row.params)] += 1
        state, cost = _run(contender, study, trial, row)
        seconds += cost
        num_pruned += state == TrialState.PRUNED
        if state == TrialState.COMPLETE and row.score is not None and row.score >= target:
            return Replay(seconds, True, number, num_pruned, number - len(had))
    return Replay(seconds, False, max_trials, num_pruned, max_trials - len(had))


def _run(contender: Contender, study: optuna.Study, trial: Trial, row: Row) -> tuple[TrialState, float]:
    """One trial as the worker runs it; how it ended, and its seconds."""
    infeasible = Outcome(row.outcome).infeasible
    for evaluation in row.evaluations:
        trial.report(evaluation.score, getattr(evaluation, contender.reported_step))
        # The worker lets a trial finish that has used up its budget.
        if trial.should_prune() and (infeasible or evaluation is not row.evaluations[-1]):
            study.tell(trial, state=TrialState.PRUNED)
            return TrialState.PRUNED, evaluation.seconds
    if not infeasible:
        told = study.tell(trial, row.score if contender.value == "best" else row.evaluations[-1].score)
    elif contender.infeasible == "constraint":
        trial.set_user_attr("outcome", row.outcome)
        trial.set_constraint("feasible", 1.0)
        told = study.tell(trial, state=TrialState.PRUNED)
    else:
        told = study.tell(trial, state=TrialState.FAIL)
    return told.state, row.seconds


def print_replays(table: Table, seeds: Sequence[int]) -> None:
    """Run the contenders with every seed over `table` and print the seconds."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    replays = {one.name: [replay(one, table, seed) for seed in seeds] for one in CONTENDERS}
    baseline = statistics.median(one.seconds for one in replays[PLAIN_TPE.name])
    rows = table.rows.values()
    num_good = sum(row.score is not None and row.score >= TARGET * table.best_score for row in rows)
    print(f"{table.study.name}: {len(rows)} configurations, {sum(row.seconds for row in rows):.0f} s;")
    print(f"  best score {table.best_score:.4f}, {num_good} with at least {TARGET:.0%} of it")
    print(f"  {len(seeds)} seeds, {seeds[0]} to {seeds[-1]}")
    titles = ("median", "mean", "min", "max", "trials", "pruned", "repeats", "missed")
    print(f"{'seconds to the target':22} {'/ plain TPE':>11}" + "".join(f"{title:>8}" for title in titles))
    for name, of_seeds in replays.items():
        seconds = [one.seconds for one in of_seeds]
        numbers = [
            *(statistic(seconds) for statistic in (statistics.median, statistics.mean, min, max)),
            statistics.median(one.num_trials for one in of_seeds),
            statistics.median(one.num_pruned for one in of_seeds),
            statistics.median(one.num_repeats for one in of_seeds),
            sum(not one.reached for one in of_seeds),
        ]
        print(f"{name:22} {numbers[0] / baseline:11.2f}" + "".join(f"{number:8.0f}" for number in numbers))
    print("trials, pruned, repeats (of an earlier trial's configuration): medians over the seeds")
    print(f"missed: seeds that did not reach the target in {MAX_TRIALS} trials; counted with those\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = table_names()
    parser.add_argument("command", choices=("tabulate", "replay"))
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(known)}; default: all")
    parser.add_argument("--seeds", type=int, default=20, help="replay: how many; default: 20")
    arguments = parser.parse_args()
    names = arguments.tables or known
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"there is no table {', '.join(unknown)}; there are {', '.join(known)}")
    for name in names:
        if arguments.command == "tabulate":
            tabulate(name)
        else:
            print_replays(load_table(name), range(arguments.seeds))


if __name__ == "__main__":
    main()
