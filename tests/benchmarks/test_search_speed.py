"""The replay on the committed tables: what holds by construction, whatever is fast."""

from __future__ import annotations

from dataclasses import replace

import optuna
import pytest
from optuna.pruners import BasePruner, NopPruner
from optuna.samplers import RandomSampler
from search_speed import OURS, RANDOM, Contender, of_study, replay
from search_table import Table, configurations, load_table, table_names


@pytest.fixture(scope="module")
def table() -> Table:
    return load_table("bert")


@pytest.mark.parametrize("name", table_names())
def test_every_configuration_has_its_whole_course(name: str) -> None:
    table = load_table(name)
    assert len(table.rows) == len(configurations(table.study))
    for row in table.rows.values():
        assert row.score == max(evaluation.score for evaluation in row.evaluations)
        seconds = [0.0, *(evaluation.seconds for evaluation in row.evaluations), row.seconds]
        assert seconds == sorted(seconds)
        steps = [evaluation.index for evaluation in row.evaluations]
        assert steps == [*range(1, len(steps) + 1)]
    assert table.header["command"] == f"python tests/benchmarks/search_speed.py tabulate {name}"


class _PruneAll(BasePruner):
    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:  # noqa: ARG002
        return True


def test_a_pruned_trial_costs_what_it_took_until_then(table: Table) -> None:
    pruning = Contender("all", lambda _, seed: (RandomSampler(seed=seed), _PruneAll()))
    pruned, whole = (replay(contender, table, 0, max_trials=1) for contender in (pruning, RANDOM))
    [row] = [row for row in table.rows.values() if row.evaluations[0].seconds == pruned.seconds]
    assert (pruned.num_pruned, whole.num_pruned) == (1, 0)
    assert whole.seconds == row.seconds
    assert not pruned.reached


def test_an_infeasible_trial_is_never_the_best(table: Table) -> None:
    """Everything but one configuration cannot run: only that one reaches the target."""
    best = max(table.rows.values(), key=lambda row: row.score or 0.0)
    broken = {"outcome": "nonfinite", "score": None, "seconds": 1.0, "evaluations": ()}
    rows = {key: row if row is best else replace(row, **broken) for key, row in table.rows.items()}
    without_pruner = replace(OURS, search=lambda *given: (of_study(*given)[0], NopPruner()))
    found = replay(without_pruner, replace(table, rows=rows), 0)
    assert found.reached
    assert found.seconds == pytest.approx(best.seconds + found.num_trials - 1)
