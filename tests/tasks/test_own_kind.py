"""A seventh kind of task, defined here, from data to predictions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import xlogy
from sklearn.metrics import d2_tweedie_score, mean_poisson_deviance
from support.tiny import tiny_executor, tiny_study
from torch.nn.functional import poisson_nll_loss

import hpo
from hpo.data.tasks import parse_tasks
from hpo.errors import DataError, StudyFileError
from hpo.evaluation.contributions import scored, unit_of
from hpo.evaluation.detailed import evaluate_predictions
from hpo.inference.rows import predicted_row
from hpo.report.data_check import check_data
from hpo.tasks.kind import KINDS, Task, register
from hpo.tasks.options import LossOptions
from hpo.tasks.regression import Regression
from hpo.tasks.sums import mean_of_windows
from hpo.training.losses import count_items, loss_sum
from hpo.trial.best_model import TrialSource, export_checkpoint, split_predictions


class Count(Regression):
    """How often something occurs: the head gives the logarithm of a rate."""

    name = "count"
    metrics = ("d2", "deviance")
    losses = ("poisson",)
    errors = ("deviance",)

    def label(self, value: Any) -> float:
        if type(value) is not int or value < 0:
            raise ValueError(f" must be a whole number of at least 0, but got {value!r}")
        return float(value)

    def fitted(self, _train: Any) -> Task:
        return self.task

    def loss_sum(self, logits: Any, target: Any, *_: Any) -> torch.Tensor:
        known = self.labelled(target)
        return poisson_nll_loss(logits.squeeze(-1)[known], target[known], reduction="sum")

    def decode(self, logits: Any, split: Any, *_: Any) -> list[float]:
        return list(np.exp(mean_of_windows(logits, split)[:, 0]).tolist())

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


def write_rows(folder: Path) -> Path:
    """Posts in which a word occurs 0 to 4 times, which is what is counted."""
    folder.mkdir()
    (folder / "tasks.json").write_text(
        json.dumps({"times": {"kind": "count"}, "tone": {"kind": "single_label", "classes": ["no", "yes"]}})
    )
    for split, size in (("train", 40), ("validation", 20), ("test", 20)):
        rows = []
        for number in range(size):
            times = number * number % 5
            labels = {"times": times, "tone": "yes" if times else "no"}
            rows.append({"id": f"{split}-{number}", "text": "it hurts " * times + "today", "labels": labels})
        (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def test_an_own_kind_trains_evaluates_and_predicts(tmp_path: Path) -> None:
    data = {"source": "jsonl", "path": str(write_rows(tmp_path / "data"))}
    training = {"max_steps": 30, "batch_size": 8, "max_length": 16, "dropout": 0.0}
    executor = tiny_executor(tmp_path, data=data, training=training, objective={"metric": "times/d2"})
    assert executor.tasks[0] == TASK
    numbers = check_data(executor.study, tmp_path / "runs").facts.tasks[0].numbers
    assert numbers["train"]["maximum"] == 4

    params = {"learning_rate": 1e-2}
    result = executor.run(params, tmp_path / "trial", None)
    assert result.outcome == "complete", result.traceback
    predicted = split_predictions(executor, tmp_path / "trial", params, "test")
    rows = predicted.examples
    truth, rates = [row.labels["times"] for row in rows], predicted.predictions["times"]
    assert predicted.metrics()["times"] == {
        "d2": pytest.approx(d2_tweedie_score(truth, rates, power=1)),
        "deviance": pytest.approx(mean_poisson_deviance(truth, rates)),
    }
    assert predicted.metrics()["times"]["d2"] > 0.5  # it has learnt to count
    detailed = evaluate_predictions(predicted, split_name="test", num_resamples=20).as_json()["tasks"][
        "times"
    ]
    assert detailed["metrics"].keys() == {"d2", "deviance"}
    # Its parent's constant prediction and bounds fit other row values.
    assert {name.partition("/")[0] for name in result.telemetry["baseline"]} == {"tone"}
    assert scored(predicted.statistics, "times/d2").row_bound == np.inf
    assert detailed["worst"][0]["loss"] == max(abs(a - b) for a, b in zip(truth, rates, strict=True))

    source = TrialSource(0, params, result.telemetry)
    model = hpo.load(
        export_checkpoint(executor, tmp_path / "trial", tmp_path / "model", source), device="cpu"
    )
    predictions = model.predict([row.text for row in rows])
    assert [one["times"].label for one in predictions] == pytest.approx(rates, rel=1e-4)
    assert predicted_row(rows[0], predictions[0])["labels"].keys() == {"times", "tone"}


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


def test_an_error_metric_of_an_own_kind_must_be_minimized(tmp_path: Path) -> None:
    with pytest.raises(StudyFileError, match="must be `minimize` for `times/deviance`: smaller is better"):
        tiny_study(tmp_path, objective={"metric": "times/deviance"})
    assert unit_of("times/deviance") == "label units"
