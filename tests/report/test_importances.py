from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pandas as pd
import pytest
from study_records import record_of, with_values
from tiny import tiny_study

from hpo.config.search_space import suggest
from hpo.report.importances import compute_importances
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import TrialRecord
from hpo.study.store.storage import open_storage
from hpo.study.store.studies import create_or_resume_study


def test_importances_find_the_parameter_that_decides() -> None:
    trials = []
    for number in range(40):
        precision = ("fp32", "bf16", "fp16")[number % 3]
        score = {"fp32": 0.5, "bf16": 0.9, "fp16": 0.1}[precision] + number / 1e5
        trials.append(with_values(number, (score,), fp_precision=precision))
    table = compute_importances(record_of(trials)).table
    assert table.loc[0, "parameter"] == "fp_precision"
    assert table["score"].sum() == pytest.approx(1)
    assert table.loc[0, "score"] > 1.5 * table.loc[1, "score"]


def test_trials_with_a_value_outside_the_space_are_not_compared() -> None:
    trials = [with_values(number, (number / 20,)) for number in range(20)]
    outside = with_values(20, (5.0,), learning_rate=0.5)
    with_it, without = (compute_importances(record_of(some)) for some in ([*trials, outside], trials))
    pd.testing.assert_frame_equal(with_it.table, without.table)


@pytest.mark.parametrize(
    ("trials", "reason"),
    [
        ([with_values(n, (0.1 * n,)) for n in range(7)], "at least 8 complete trials; there are 7"),
        ([with_values(n, (0.5,)) for n in range(20)], "differ too little"),
        (
            [dataclasses.replace(with_values(n, (0.1 * n,)), params={}, distributions={}) for n in range(20)],
            "No parameter was searched",
        ),
    ],
    ids=["too few", "all equal", "nothing searched"],
)
def test_why_there_are_no_importances(trials: list[TrialRecord], reason: str) -> None:
    found = compute_importances(record_of(trials))
    assert reason in found.why_none
    assert found.table.empty


def test_choices_that_are_lists_count_once(tmp_path: Path, sqlite_url: str) -> None:
    """Two settings drawn alike are equally important, whether Optuna holds a choice as it is or as JSON."""
    betas, poolings = [[0.9, 0.999], [0.9, 0.99]], ["cls", "mean"]
    space = {
        "betas": {"type": "categorical", "choices": betas},
        "pooling": {"type": "categorical", "choices": poolings},
    }
    config = tiny_study(tmp_path, search_space=space, n_trials=20)
    with open_storage(sqlite_url) as storage:
        create_or_resume_study(storage, config)
        study = storage.load_study(config.name)
        for number in range(20):
            study.enqueue_trial({"betas": json.dumps(betas[number % 2]), "pooling": poolings[number % 2]})
            trial = study.ask()
            suggest(config.search_space, trial)
            study.tell(trial, number % 2 + number / 100)
        table = compute_importances(read_study(storage, config.name)).table
    assert list(table["score"]) == pytest.approx([0.5, 0.5])
