"""The names and values of objectives and limits."""

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.jsonl_sets import write_set
from support.tiny import CPU, tiny_executor, tiny_study

from hpo.config.resolved_study import resolve_study
from hpo.data.dataset import load_data
from hpo.errors import InputError
from hpo.report.data_check import DataCheck, check_data
from hpo.tasks.kind import Task
from hpo.training.metrics import primary_mean
from hpo.trial import objectives
from hpo.trial.executor import build_executor
from hpo.trial.objectives import check_names, decision_metrics, objective_value

TASKS = (Task("topic", "single_label", ("a", "b")), Task("size", "regression", ()))
METRICS = {"topic": {"f1_macro": 0.5, "accuracy": 0.7}, "size": {"r2": 0.1, "mae": 2.0}}


def test_missing_metric_is_an_error_and_never_nan() -> None:
    no_size = METRICS | {"size": {}}
    assert primary_mean(TASKS, no_size) is None
    for metric, metrics in (("score", no_size), ("size/r2", {"topic": {}, "size": {"r2": math.nan}})):
        with pytest.raises(InputError, match=f"the metric {metric} has no value"):
            objective_value(metric, metrics, TASKS, {})


@pytest.mark.parametrize(
    ("key", "content"),
    [("objective", {"metric": "criteria/f1_macor"}), ("constraints", {"criteria/f1_macor": {"min": 0}})],
)
def test_unknown_metric_gets_the_nearest_name(key: str, content: Any, tmp_path: Path) -> None:
    study = tiny_study(tmp_path, **{key: content})
    data = load_data(study.data)
    with pytest.raises(InputError, match=rf"^{key}.*'criteria/f1_macor'\. Did you mean `criteria/f1_macro`"):
        check_names(study, data.tasks, data.splits)


def load_and_check(folder: Path, **study: Any) -> DataCheck:
    return check_data(tiny_study(folder, **study), folder)


@pytest.mark.parametrize("check", [tiny_executor, load_and_check])
@pytest.mark.parametrize(
    ("study", "message"),
    [
        ({"training": {"loss_weight": {"sevrity": 2}}}, r"^loss_weight\.sevrity: .* mean `severity`\?"),
        (
            {"search_space": {"head_type.sevrity": {"type": "categorical", "choices": ["linear", "mlp"]}}},
            r"^head_type\.sevrity: .* mean `severity`\?",
        ),
        ({"evaluation": {"test": True}}, "^evaluation.test: the data must have a test split"),
    ],
)
def test_unknown_names_in_a_study_are_refused(
    study: dict[str, Any], message: str, check: Any, tmp_path: Path
) -> None:
    rows = [{"id": "1", "text": "bad", "labels": {"severity": "high"}}]
    tasks = {"severity": {"kind": "single_label", "classes": ["low", "high"]}}
    write_set(tmp_path / "set", tasks, train=rows, validation=[rows[0] | {"id": "2"}])
    with pytest.raises(InputError, match=message):
        check(tmp_path, **study, data={"source": "jsonl", "path": str(tmp_path / "set")})


@pytest.mark.parametrize("check", [tiny_executor, load_and_check])
@pytest.mark.parametrize(("metric", "num"), [("score", 1), ("score", 2), ("size/r2", 1), ("size/mae", 1)])
def test_metric_needs_a_value_on_validation(metric: str, num: int, check: Any, tmp_path: Path) -> None:
    labels = [{"topic": "ab"[n % 2], **({"size": n} if n < num else {})} for n in range(6)]
    rows = [{"id": f"{n}", "text": f"text {n}", "labels": one} for n, one in enumerate(labels)]
    tasks = {"size": {"kind": "regression"}, "topic": {"kind": "single_label", "classes": ["a", "b"]}}
    validation = [{**row, "id": f"v{row['id']}"} for row in rows]
    write_set(tmp_path / "set", tasks, train=rows, validation=validation)
    objective = {"metric": metric, "direction": "minimize" if metric.endswith("mae") else "maximize"}
    study = {"objective": objective, "data": {"source": "jsonl", "path": str(tmp_path / "set")}}
    text = r"the metric size/r2 must have a value .* Use another metric, label more rows, or declare"
    is_refused = num == 1 and metric != "size/mae"
    with pytest.raises(InputError, match=text) if is_refused else nullcontext():
        check(tmp_path, **study)


def test_a_checked_study_is_not_scored_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every joining worker would score all rows of validation before its first trial."""
    resolved = resolve_study(tiny_study(tmp_path), CPU)
    monkeypatch.setattr(objectives, "right_statistics", lambda *_: pytest.fail("scored"))
    build_executor(resolved, tmp_path, checks_values=False)
    with pytest.raises(pytest.fail.Exception, match="scored"):
        build_executor(resolved, tmp_path)


def test_thresholds_suit_the_objective_of_their_task() -> None:
    assert decision_metrics(["score", "tags/f1_micro"]) == {"tags": "f1_micro"}
    assert decision_metrics(["tags/f1_micro", "tags/exact_match"]) == {"tags": "f1_micro"}


def test_values_of_objectives() -> None:
    assert objective_value("score", METRICS, TASKS, {}) == pytest.approx(0.3), "the mean of primary metrics"
    diverged = METRICS | {"size": {"r2": -40.0}}
    assert objective_value("score", diverged, TASKS, {}) == 0.25, "a negative r2 counts as zero in it"
    assert objective_value("size/r2", diverged, TASKS, {}) == -40.0
    resampled = {"topic": {"f1_macro": np.ones(2)}, "size": {"r2": np.array([-9, 0.5])}}
    assert primary_mean(TASKS, resampled).tolist() == [0.5, 0.75]
    unmeasured = {"train_tokens_per_second": None}
    assert math.isnan(objective_value("train_tokens_per_second", METRICS, TASKS, unmeasured))


def test_errors_of_classes_count_as_shares_in_the_score() -> None:
    """The geometric mean of the probabilities of the truth, and 1 less the calibration error."""
    tasks = [
        Task(name, "single_label", ("a", "b"), primary=name) for name in ("log_loss", "calibration_error")
    ]
    metrics = {"log_loss": {"log_loss": math.log(2)}, "calibration_error": {"calibration_error": 0.1}}
    assert primary_mean(tasks, metrics) == pytest.approx((0.5 + 0.9) / 2)
    worse = Task("size", "regression", primary="pearson")
    assert primary_mean([worse], {"size": {"pearson": -0.3}}) == 0
