from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest, multinomial

from hpo.data.examples import Example
from hpo.data.tasks import Task
from hpo.deploy.net_loss import ALPHA, TextChanges, least_rows, text_changes
from hpo.training.metrics import row_statistics


def test_without_changes_it_is_that_of_clopper_and_pearson() -> None:
    bound = TextChanges(0, 0, 455).highest_net_share()
    interval = binomtest(0, 455, alternative="less").proportion_ci(1 - ALPHA / 2, "exact")
    assert bound == pytest.approx(interval.high)
    assert TextChanges(0, 0, least_rows(0.01)).highest_net_share() <= 0.01
    assert TextChanges(0, 0, least_rows(0.01) - 1).highest_net_share() > 0.01
    assert least_rows(2.0) == 1


@pytest.mark.parametrize(("worse", "better"), [(0.05, 0.0), (0.1, 0.02)])
def test_it_is_below_the_truth_at_most_as_often_as_stated(worse: float, better: float) -> None:
    """Of all numbers of changes that can come, each with its probability."""
    rows = 10
    chances = multinomial(rows, [worse, better, 1 - worse - better])
    below = 0.0
    for losses in range(rows + 1):
        for gains in range(rows + 1 - losses):
            chance = chances.pmf([losses, gains, rows - losses - gains])
            if chance > 1e-6:
                below += chance * (TextChanges(losses, gains, rows).highest_net_share() < worse - better)
    assert below <= ALPHA


def test_many_changes_both_ways_are_decided() -> None:
    """Where Clopper's and Pearson's bound of the losses alone never would be."""
    assert TextChanges(60, 60, 4000).highest_net_share() < 0.01
    assert TextChanges(60, 200, 4000).highest_net_share() == 0.0


def test_texts_are_counted_over_tasks() -> None:
    tasks = [Task("intent", "single_label", ("a", "b")), Task("topics", "multi_label", ("x", "y", "z"))]
    tasks.append(Task("size", "regression", ()))
    labels = [{"intent": "a", "topics": ["x"], "size": 1.0}] * 4 + [{"topics": ["y"]}, {}]
    examples = [Example(str(i), "text", of, {}, annotated=frozenset(of)) for i, of in enumerate(labels)]
    fp32 = {"intent": ["a"] * 4 + ["b"] * 2, "topics": [["x"]] * 6, "size": [1.0] * 6}
    int8 = fp32 | {"intent": ["b", "b", *"aaab"], "topics": [["x"], [], ["x"], ["x", "z"], ["y"], []]}
    found, reference = (
        {task.name: row_statistics(task, of[task.name], examples) for task in tasks} for of in (int8, fp32)
    )
    assert text_changes(found, reference) == TextChanges(worse=3, better=1, num_rows=5)
    assert text_changes({"size": found["size"]}, reference) is None
    assert np.isfinite(TextChanges(3, 1, 5).highest_net_share())
