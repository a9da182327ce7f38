from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.command_line import hpo_command, ok
from support.own_code_studies import EXAMPLE
from support.own_code_studies import write as write_code_study
from support.tiny import tiny_study, write_study

from hpo.report.plan import TrialCost, make_plan

PROMOTE = {"name": "promote", "starts": 0.1, "keep": 1}


def cost(seconds: float, precision: str = "fp32") -> TrialCost:
    return TrialCost(precision, 100.0, seconds, "a test")


def planned(tmp_path: Path, *costs: TrialCost, num_workers: int = 1, **changes: Any) -> Any:
    return make_plan(tiny_study(tmp_path, **changes), list(costs), None, num_workers)


def test_what_a_number_of_trials_comes_to(tmp_path: Path) -> None:
    """Of 30 starts ten go on to 0.3, and three to the end: 3 + 2 + 2.1 whole trials."""
    plan = planned(tmp_path, cost(60), cost(20, "bf16"), num_workers=2, n_trials=30, pruner=PROMOTE)
    assert [(stage.end, stage.num_trials) for stage in plan.stages] == [(0.1, 30), (0.3, 10), (1.0, 3)]
    assert plan.whole_trials == pytest.approx(7.1)
    assert plan.hours == pytest.approx(7.1 * 40 / 3600)
    assert plan.hours_to_the_end == pytest.approx(plan.hours / 2)


@pytest.mark.parametrize(("pruner", "num_trials"), [({"name": "none"}, 7), (PROMOTE, 28)])
def test_what_a_budget_buys(tmp_path: Path, pruner: dict[str, Any], num_trials: int) -> None:
    """Of 28 starts nine and three go on, which is 6.7 whole trials; of 30 it would be 7.1."""
    plan = planned(tmp_path, cost(60), n_trials=100, budget={"hours": 7.05 * 60 / 3600}, pruner=pruner)
    assert plan.stages[0].num_trials in (num_trials, num_trials + 1)
    assert plan.whole_trials <= 7.05


UNDEFINED = """

@hpo.metric("rank", ["single_label"])
def rank(truths, predictions):
    return 1.0 if truths == predictions else float("nan")
"""


def test_a_cost_needs_no_objective(tmp_path: Path) -> None:
    """A metric may have no value after so few steps."""
    limits = {"peak_memory_bytes": {"max": 1}}
    write_code_study(
        tmp_path, EXAMPLE + UNDEFINED, objective={"metric": "tone/rank"}, constraints=limits, search_space={}
    )
    told = ok(hpo_command(tmp_path, "plan", "tiny.yaml", "--json")).json
    assert [one["measured_by"] for one in told["costs"]] == ["13 steps"]


def test_it_is_measured_first_and_then_by_the_trials(tmp_path: Path) -> None:
    write_study(tmp_path, n_trials=2)
    before = ok(hpo_command(tmp_path, "plan", "tiny.yaml", "--workers", "2", "--json")).json
    assert [one["measured_by"] for one in before["costs"]] == ["13 steps"]
    assert before["whole_trials"] == 2
    assert before["hours"] == pytest.approx(2 * before["costs"][0]["seconds"] / 3600)
    assert before["hours_to_the_end"] == pytest.approx(before["hours"] / 2)
    assert not (tmp_path / "runs/hpo.db").exists(), "nothing is stored"
    ok(hpo_command(tmp_path, "run", "tiny.yaml"))
    after = ok(hpo_command(tmp_path, "plan", "tiny.yaml", "--json")).json
    assert [one["measured_by"] for one in after["costs"]] == ["2 complete trials"]
    assert after["spent_hours"] > 0
    told = ok(hpo_command(tmp_path, "plan", "tiny.yaml", "--hours", "0.01")).out
    assert "of the budget of 36 s" in told
