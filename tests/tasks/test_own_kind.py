"""A seventh kind of task, defined here: its metrics, loss and name."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import xlogy
from sklearn.metrics import d2_tweedie_score, mean_poisson_deviance
from support.tiny import tiny_study
from torch.nn.functional import poisson_nll_loss

from hpo.data.tasks import parse_tasks
from hpo.errors import DataError, StudyFileError
from hpo.evaluation.contributions import unit_of
from hpo.tasks.example import Example
from hpo.tasks.kind import KINDS, Task, kind_of, register
from hpo.tasks.options import LossOptions
from hpo.tasks.regression import Regression
from hpo.training.losses import count_items, loss_sum
from hpo.training.metrics import row_statistics


class Count(Regression):
    """How often something occurs: the head gives the logarithm of a rate."""

    name = "count"
    metrics = ("d2", "deviance")
    losses = ("poisson",)
    errors = ("deviance",)

    def loss_sum(self, logits: Any, target: Any, *_: Any) -> torch.Tensor:
        known = self.labelled(target)
        return poisson_nll_loss(logits.squeeze(-1)[known], target[known], reduction="sum")

    def row_values(self, predicted: Any, examples: Any) -> Any:
        truth_N = np.array([example.labels[self.task.name] for example in examples])
        rate_N = np.array(predicted)
        deviance_N = xlogy(truth_N, truth_N / rate_N) - truth_N + rate_N
        return {}, {"deviance": deviance_N, "truth": truth_N, "log_truth": xlogy(truth_N, truth_N)}

    def scores(self, rows_B: Any, _counts: Any, sums_B: Any, _whole: Any) -> Any:
        of_mean_B = sums_B["log_truth"] - xlogy(sums_B["truth"], sums_B["truth"] / rows_B)
        deviance_B = sums_B["deviance"]
        return {"d2": 1 - deviance_B / of_mean_B, "deviance": 2 * deviance_B / rows_B}


TASK = Task("times", "count")


@pytest.fixture(autouse=True)
def registered(forgotten: None) -> Iterator[None]:
    """Register the kind, also if earlier tests of this process have one of its name."""
    del forgotten
    register(Count)
    yield
    del KINDS["count"]


def test_metrics_and_verdicts_of_an_own_kind() -> None:
    truth, rates = [0.0, 1.0, 4.0, 2.0], [0.5, 2.0, 3.0, 2.5]
    rows = [Example("r", "text", {"times": one}, {}, annotated=frozenset({"times"})) for one in truth]
    statistics = row_statistics(TASK, rates, rows)
    d2, deviance = d2_tweedie_score(truth, rates, power=1), mean_poisson_deviance(truth, rates)
    assert statistics.scores() == pytest.approx({"d2": d2, "deviance": deviance})
    (twice,) = statistics.weighted_scores(np.array([[1, 0, 2, 0]]))["d2"]
    assert twice == pytest.approx(d2_tweedie_score([0, 4, 4], [0.5, 3.0, 3.0], power=1))
    # Its parent's constant prediction and bounds fit other row values.
    kind = kind_of(TASK)
    values = {"deviance": np.ones(4)}
    assert kind.row_bound("d2", {}, values) == np.inf
    assert kind.constant_rows("d2", {}, values) is None
    assert kind.row_losses(rates, rows, None).tolist() == [0.5, 1.0, 1.0, 0.5]


def test_loss_of_an_own_kind_counts_labelled_rows() -> None:
    logits, target = torch.tensor([[0.5], [1.0], [9.0]]), torch.tensor([2.0, 0.0, torch.nan])
    loss = loss_sum(TASK, logits, target, LossOptions("focal"), None, torch.ones(3, 1))
    assert float(loss) == pytest.approx(np.exp(0.5) - 2 * 0.5 + np.exp(1.0))
    assert count_items(TASK, target) == 2


def test_a_kind_needs_a_new_name_and_joins_the_known_ones() -> None:
    with pytest.raises(ValueError, match="there is a kind of task `count` already"):
        register(type("Other", (Count,), {}))
    with pytest.raises(DataError, match=r"must be one of single_label, .* count, but got `counts`.*`count`"):
        parse_tasks({"times": {"kind": "counts"}}, "t.json")


def test_other_arguments_of_from_cell_are_refused() -> None:
    wrong = {"name": "wrong", "from_cell": classmethod(lambda _cls, cell, csv: (cell, csv))}
    with pytest.raises(ValueError, match=r"from_cell\(cls, cell, list_separator"):
        register(type("Wrong", (Count,), wrong))
    assert "wrong" not in KINDS


def test_an_error_metric_of_an_own_kind_must_be_minimized(tmp_path: Path) -> None:
    with pytest.raises(StudyFileError, match="must be `minimize` for `times/deviance`: smaller is better"):
        tiny_study(tmp_path, objective={"metric": "times/deviance"})
    assert unit_of("times/deviance") == "label units"
