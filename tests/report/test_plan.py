"""Plans of a study, and the statements of `hpo compare` before its first trial."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.jsonl_sets import load_set, write_set
from support.planted_comparison import plan_of
from support.study_records import fake_trial
from support.tiny import tiny_executor
from support.tiny_loop import config_of
from support.worker_process import study

from hpo.data.dataset import DataSet
from hpo.report.plan import Plan, TrialCost, comparison_limit, measure_cost, whole_seconds
from hpo.study.sampling.forecast import Stage

ACCURACY = study(1, objective={"metric": "topic/accuracy"})


def plan(*stages: Stage, whole: float = 1.0, **changes: Any) -> list[str]:
    facts = {"hours": 2.0, "spent_hours": 0.0, "num_workers": 1, "budget_hours": None, "pruner": "none; set"}
    return Plan([], [*stages], whole, **{**facts, **changes}).text().splitlines()


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        ([Stage(0.0, 1.0, 6)], "Left to run: 6 trials, full budget."),
        ([Stage(0.0, 0.05, 30), Stage(0.05, 1.0, 10)], "30 trials from 0% to 5%, 10 paused trials from 5%"),
        ([Stage(0.0, 0.05, 0), Stage(0.05, 1.0, 2)], ": 2 paused trials from 5% to 100%; 5.05"),
        ([Stage(0.0, 1.0, 0)], "No trial is left to run."),
    ],
)
def test_plan_names_the_remaining_stages(stages: list[Stage], text: str) -> None:
    assert text in "\n".join(plan(*stages, whole=5.05))


@pytest.fixture
def data(tmp_path: Path) -> DataSet:
    splits = {
        split: [
            {"id": f"{split}{n}", "text": f"x {n}", "labels": {"topic": "a" if n % 2 else "b"}}
            for n in range(num)
        ]
        for split, num in (("train", 20), ("validation", 21), ("test", 100))
    }
    topic = {"kind": "single_label", "classes": ["a", "b"]}
    return load_set(write_set(tmp_path / "data", {"topic": topic}, **splits))


def test_few_rows_cannot_show_a_precision_to_be_as_good(data: DataSet) -> None:
    """Clopper and Pearson: of 100 rows that agree up to 3.62 % of new rows may differ."""
    text, can_be_as_good = comparison_limit(ACCURACY, data, 0.5)
    assert not can_be_as_good
    assert text.startswith("With 100 labelled rows of test, losses under 3.63 points cannot be excluded")
    assert "A margin of 0.5 needs 736 such rows." in text
    assert text.endswith("be as good as fp32. Label more rows of test to change that.")


@pytest.mark.parametrize(("seeds", "can_be_as_good"), [(14, False), (15, True)])
def test_few_runs_cannot_show_a_precision_to_be_as_good(
    data: DataSet, seeds: int, can_be_as_good: bool
) -> None:
    limit = comparison_limit(ACCURACY, data, 5.0, plan_of(seeds))
    assert limit.can_be_as_good == can_be_as_good
    assert limit.text.endswith(f"needs at least 15 runs; this comparison has at most {seeds}.")


@pytest.mark.parametrize("is_missing", [False, True])
def test_a_test_split_without_labels_is_replaced_by_validation(data: DataSet, is_missing: bool) -> None:
    splits = {name: data.splits[name] for name in ("train", "validation")}
    if not is_missing:
        splits["test"] = [replace(one, labels={}, annotated=frozenset()) for one in data.splits["test"]]
    limit = comparison_limit(ACCURACY, replace(data, splits=splits), 0.5)
    assert "With 21 labelled rows of validation," in limit.text


def test_plan_states_a_spread() -> None:
    text = "\n".join(plan(Stage(0.0, 0.05, 30), Stage(0.05, 1.0, 10), whole=4.16, most_whole_trials=5.04))
    assert "4.16 full budgets in all, or up to 5.04 by the order of the results." in text
    cost = TrialCost("bf16", 10.0, 60.0, "3 complete trials", spread_seconds=(50.0, 90.0))
    line = Plan([cost], [], 0.0, 0.0, 0.0, 1, None, "none").text().splitlines()[0]
    assert line == "A trial in bf16: 1 min 00 s, 10 examples/s (3 complete trials, 50 s to 1 min 30 s)."


def test_compilation_counts_once() -> None:
    """The setup includes the compilation before the first step."""
    seconds = {"setup_seconds": 30.0, "train_seconds": 100.0, "evaluation_seconds": 10.0}
    trial = fake_trial(0, "fp32")
    trial.telemetry.update(seconds | {"compile_seconds": 25.0, "late_compile_seconds": 5.0})
    assert whole_seconds(trial) == 145.0


def test_plan_of_texts_in_windows(tmp_path: Path) -> None:
    """A batch has windows, and a rate counts examples."""
    training = {"max_length": 16, "epochs": None, "max_steps": 5000, "batch_size": 8}
    data = {"source": "synthetic", "long_text": "window"}
    executor = tiny_executor(tmp_path, data=data, training=training, evaluation={"per_trial": 1})
    cost = measure_cost(executor.resolved, tmp_path / "runs", "fp32")
    split = executor.loader.tokens("train", config_of(executor))
    assert split.num_windows > 2 * len(split.examples)
    assert cost.examples_per_second is not None
    batches_of_examples = 5000 * 8 * len(split.examples) / split.num_windows
    expected = batches_of_examples / cost.examples_per_second
    assert cost.seconds - cost.run_seconds == pytest.approx(expected)
