from __future__ import annotations

import dataclasses

import pytest
from study_records import record_of, with_values

from hpo.report.importances import importance_table, why_no_importances
from hpo.study.study_record import TrialRecord


def test_importances_find_the_parameter_that_decides() -> None:
    trials = []
    for number in range(40):
        precision = ("fp32", "bf16", "fp16")[number % 3]
        score = {"fp32": 0.5, "bf16": 0.9, "fp16": 0.1}[precision] + number / 1e5
        trials.append(with_values(number, (score,), fp_precision=precision))
    table = importance_table(record_of(trials))
    assert table.loc[0, "parameter"] == "fp_precision"
    assert table["score"].sum() == pytest.approx(1)
    assert table.loc[0, "score"] > 1.5 * table.loc[1, "score"]


def test_importances_take_values_outside_the_range_and_lists() -> None:
    trials = [
        with_values(number, (number / 20,), learning_rate=0.5, betas=[0.9, 0.9 + number % 2 / 100])
        for number in range(20)
    ]
    assert {"learning_rate", "betas"} <= set(importance_table(record_of(trials))["parameter"])


@pytest.mark.parametrize(
    ("trials", "reason"),
    [
        ([with_values(n, (0.1 * n,)) for n in range(7)], "at least 8 complete trials; there are 7"),
        ([with_values(n, (0.5,)) for n in range(20)], "differ too little"),
        (
            [dataclasses.replace(with_values(n, (0.1 * n,)), params={}) for n in range(20)],
            "No parameter was searched",
        ),
    ],
    ids=["too few", "all equal", "nothing searched"],
)
def test_why_there_are_no_importances(trials: list[TrialRecord], reason: str) -> None:
    assert reason in why_no_importances(record_of(trials))
    assert importance_table(record_of(trials)).empty
