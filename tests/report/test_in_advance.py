"""The statements that `hpo compare` makes before its first trial."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.jsonl_sets import load_set, write_set
from support.planted_comparison import plan_of, record_of, search_config
from support.worker_process import study

from hpo.data.dataset import DataSet
from hpo.report.in_advance import limit_in_advance, trials_in_advance
from hpo.tasks.labels import SingleLabel

KIND = {"kind": "single_label", "classes": ["a", "b", "rare"]}


def data_of(folder: Path, num_test: int, task: Any = KIND, num_rare: int = 2) -> DataSet:
    def rows(num: int) -> list[dict[str, Any]]:
        labels = ["rare"] * num_rare + ["a", "b"] * num
        return [
            {"id": f"{num}-{n}", "text": f"x {n}", "labels": {"topic": label}}
            for n, label in enumerate(labels[:num])
        ]

    splits = {"train": rows(20), "validation": rows(21), "test": rows(num_test)}
    return load_set(write_set(folder / "data", {"topic": task}, **splits))


def test_few_rows_cannot_show_a_precision_to_be_as_good(tmp_path: Path) -> None:
    """Clopper and Pearson: of 100 rows that agree up to 3.62 % of new rows may differ."""
    data = data_of(tmp_path, 100)
    config = study(1, objective={"metric": "topic/accuracy"})
    told = limit_in_advance(config, data, 0.5)
    assert told.startswith("With 100 labelled rows of test, losses under 3.63 points cannot be excluded. ")
    assert "A margin of 0.5 takes 736 such rows." in told
    assert told.endswith(
        " So no precision can be shown to be as good as fp32. Label more rows of test to change that."
    )


def test_enough_rows_state_their_limit_alone(tmp_path: Path) -> None:
    told = limit_in_advance(study(1, objective={"metric": "topic/accuracy"}), data_of(tmp_path, 1000), 0.5)
    assert told == "With 1,000 labelled rows of test, losses under 0.37 points cannot be excluded."


def test_classes_with_too_few_rows_are_named(tmp_path: Path) -> None:
    told = limit_in_advance(study(1, objective={"metric": "topic/f1_macro"}), data_of(tmp_path, 4000), 2.0)
    assert "too few rows, so their loss is unknown: `rare` (2)." in told
    assert "no precision can be shown to be as good as fp32" in told


def test_a_test_split_without_labels_leaves_the_judgement_to_validation(tmp_path: Path) -> None:
    data = data_of(tmp_path, 100)
    bare = [replace(one, labels={}, annotated=frozenset()) for one in data.splits["test"]]
    unlabelled = replace(data, splits={**data.splits, "test": bare})
    config = study(1, objective={"metric": "topic/accuracy"})
    assert "With 21 labelled rows of validation," in limit_in_advance(config, unlabelled, 0.5)
    none = replace(data, splits={name: data.splits[name] for name in ("train", "validation")})
    assert "With 21 labelled rows of validation," in limit_in_advance(config, none, 0.5)


def test_an_error_has_the_limit_of_a_constant_prediction(tmp_path: Path) -> None:
    """Right predictions leave a row a far larger share of the rmse than it has in any run."""

    def rows(num: int) -> list[dict[str, Any]]:
        return [{"id": f"{num}-{n}", "text": f"x {n}", "labels": {"topic": float(n % 2)}} for n in range(num)]

    splits = {"train": rows(20), "validation": rows(21), "test": rows(1000)}
    data = load_set(write_set(tmp_path / "data", {"topic": {"kind": "regression"}}, **splits))
    config = study(1, objective={"metric": "topic/rmse", "direction": "minimize"})
    told = limit_in_advance(config, data, 0.01)
    # an rmse of 0.5, in which a row of error 1 adds about 1 / (2 * 0.5 * 1000), with 3.68 such rows of 1000
    assert told == "With 1,000 labelled rows of test, losses under 0.01 label units cannot be excluded."


def test_a_metric_of_the_users_own_code_has_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SingleLabel, "row_bound", lambda *_: float("inf"))
    told = limit_in_advance(study(1, objective={"metric": "topic/accuracy"}), data_of(tmp_path, 100), 0.5)
    assert told == (
        "By how much one row can change topic/accuracy is unknown, so no loss can be excluded. So no "
        "precision can be shown to be as good as fp32."
    )


def test_the_largest_number_of_trials_and_their_hours() -> None:
    """Two precisions of one configuration with 12 seeds each; whole trials took 130 s and 170 s."""
    config = search_config()
    record = record_of(
        config,
        [{"learning_rate": 1e-5}, {"learning_rate": 3e-5}, {"learning_rate": 1e-4}],
        lambda params: None if params["learning_rate"] == 1e-4 else 80.0,
    )
    parts = [
        {"setup_seconds": 10.0, "train_seconds": 100.0, "evaluation_seconds": 20.0},
        {"setup_seconds": 10.0, "train_seconds": 140.0, "evaluation_seconds": 20.0},
        {"setup_seconds": 1.0, "train_seconds": 1.0},
    ]
    trials = [
        replace(one, telemetry={**one.telemetry, **part})
        for one, part in zip(record.trials, parts, strict=True)
    ]
    told = trials_in_advance(replace(record, trials=trials), plan_of(3, 12))
    assert told == "At most 24 trials, about 1 h 00 min on one worker."
