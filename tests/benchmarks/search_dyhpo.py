"""The searches of `search_tables.py` by DyHPO, as Syne Tune has it: a Gaussian process of settings and time.

    python tests/benchmarks/search_dyhpo.py FOLDER [--seeds 3] [--compute 20]

Needs `syne-tune[gpsearchers]==0.13.0`, which has DyHPO and wants NumPy 1: an environment of its own. A trial
may pause after each tenth of its training, and DyHPO draws from the runs of the table. A run that breaks is
an error to it. Prints `{table: {compute: median regret}}`.

Wistuba et al., "Supervising the Multi-Fidelity Race of Hyperparameter Configurations", 2022,
https://arxiv.org/abs/2202.09774.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path

from curves import Curves, load, table_paths
from syne_tune.backend.trial_status import Trial
from syne_tune.config_space import loguniform, uniform
from syne_tune.optimizer.baselines import DyHPO
from syne_tune.optimizer.scheduler import SchedulerDecision

NUM_PARTS = 10
COMPUTE = (5, 10, 20, 40)
"""Whole runs."""


def search(curves: Curves, compute: int, seed: int) -> list[tuple[float, float]]:
    """What was spent when a run had ended, and its loss."""
    space = {
        name: (loguniform if one.log else uniform)(one.low, one.high) for name, one in curves.space.items()
    }
    scheduler = DyHPO(
        space,
        metric="loss",
        mode="min",
        resource_attr="part",
        max_t=NUM_PARTS,
        grace_period=1,
        rung_increment=1,
        random_seed=seed,
        search_options={"restrict_configurations": list(curves.params), "debug_log": False},
    )
    row_of = {tuple(params.values()): row for row, params in enumerate(curves.params)}
    trials: dict[int, Trial] = {}
    trained: dict[int, int] = {}
    spent, ended = 0.0, []
    while spent < compute:
        suggestion = scheduler.suggest(len(trials))
        if suggestion is None:
            break
        if suggestion.spawn_new_trial_id:
            number = len(trials)
            trials[number] = Trial(number, suggestion.config, datetime.now(UTC))
            trained[number] = 0
            scheduler.on_trial_add(trials[number])
        else:
            number = suggestion.checkpoint_trial_id
        trial = trials[number]
        row = row_of[tuple(trial.config[name] for name in curves.space)]
        while True:
            part = trained[number] + 1
            loss = curves.loss(row, curves.at(Fraction(part, NUM_PARTS)))
            spent += 1 / NUM_PARTS
            trained[number] = part
            if math.isnan(loss):
                scheduler.on_trial_error(trial)
                break
            result = {"loss": loss, "part": part}
            if part == NUM_PARTS:
                scheduler.on_trial_complete(trial, result)
                ended.append((spent, loss))
                break
            if scheduler.on_trial_result(trial, result) != SchedulerDecision.CONTINUE:
                break
    return ended


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--compute", type=int, choices=COMPUTE, default=20, help="whole runs, at most")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    result = {}
    for path in table_paths(arguments.folder):
        curves = load(path)
        found = [search(curves, arguments.compute, seed) for seed in range(arguments.seeds)]
        result[path.stem] = {
            str(compute): statistics.median(
                curves.regret(min((loss for spent, loss in one if spent <= compute + 1e-9), default=None))
                for one in found
            )
            for compute in COMPUTE
            if compute <= arguments.compute
        }
        print(json.dumps({path.stem: result[path.stem]}), flush=True)


if __name__ == "__main__":
    main()
