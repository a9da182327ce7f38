"""Sentences of the screens are whole: each says what is the case, and what to do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.study_records import DEFINITION, fake_trial, record_of

from hpo.report import screens
from hpo.report.limits import limits_told
from hpo.report.plan import Plan
from hpo.report.spending import spending_told
from hpo.report.status import study_status
from hpo.study.reading.overview import StudyOverview
from hpo.study.sampling.forecast import Stage

AGAIN = "To continue it: hpo resume fake, then hpo worker fake"


def plan(*stages: Stage, whole: float = 1.0, **changes: Any) -> list[str]:
    facts = {"hours": 2.0, "spent_hours": 0.0, "num_workers": 1, "budget_hours": None, "pruner": "none; set"}
    return Plan([], [*stages], whole, **{**facts, **changes}).text().splitlines()


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([Stage(0.0, 1.0, 6)], "6 new trials train to the end."),
        (
            [Stage(0.0, 0.05, 30), Stage(0.05, 1.0, 10)],
            "30 new trials train to 5% of their training; 10 paused trials continue from 5% to the end.",
        ),
        ([Stage(0.0, 0.05, 0), Stage(0.05, 1.0, 2)], "2 paused trials continue from 5% to the end."),
    ],
)
def test_a_plan_names_the_stages_left(stages: list[Stage], said: str) -> None:
    whole = "Together they train as much as 5.05 whole trials."
    assert f"Left to run: {said} {whole}" in plan(*stages, whole=5.05)
    assert "No trial is left to run." in plan(Stage(0.0, 1.0, 0), whole=0.0)


def test_a_plan_compares_its_time_with_the_budget() -> None:
    assert "Device time in all: about 2 h 00 min." in plan()
    assert "Device time in all: about 2 h 00 min, of which 30 min 00 s are spent." in plan(spent_hours=0.5)
    told = plan(budget_hours=3.0, spent_hours=0.5)
    assert (
        "Device time in all: about 2 h 00 min of the budget of 3 h 00 min, of which 30 min 00 s are spent."
        in told
    )


def test_limits_are_told_one_by_one() -> None:
    limits = {"peak_memory_bytes": {"max": 5e8}, "criteria/f1_micro": {"min": 0.5}}
    both = {"peak_memory_bytes": 0.25, "criteria/f1_micro": 0.1}
    memory = {"peak_memory_bytes": 0.25}
    trials = [
        dataclasses.replace(fake_trial(0, "fp32"), constraints=both),
        fake_trial(1, "fp32"),
        dataclasses.replace(fake_trial(2, "fp32", "pruned"), constraints=memory),
    ]
    (told,) = limits_told(record_of(trials, definition={**DEFINITION, "constraints": limits}))
    assert told == (
        "1 of 2 complete trials meets all limits of the study. 1 trial ended early because it broke a limit. "
        "`peak_memory_bytes <= 5e+08` is broken by 2 trials. `criteria/f1_micro >= 0.5` is broken by 1 trial."
    )


def test_spending_says_on_what() -> None:
    definition = {**DEFINITION, "budget": {"hours": 10.0}}
    trials = [fake_trial(0, "fp32"), fake_trial(1, "bf16", "pruned")]
    record = record_of(trials, definition=definition, spent={0: 3600.0, 1: 1800.0})
    assert spending_told(record)[0] == (
        "1.5 of 10 device-hours are spent (15%). By precision: fp32 1 h, bf16 0.5 h. "
        "By outcome: complete 1 h, pruned 0.5 h."
    )
    unspent = record_of([], definition=definition)
    assert spending_told(unspent)[0] == "0 of 10 device-hours are spent (0%)."


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "No worker is running. To start one: hpo worker fake"),
        ({"state": "paused"}, "The study is paused. To continue it: hpo resume fake, then hpo worker fake"),
        (
            {"state": "cancelled"},
            "The study is cancelled. To continue it: hpo resume fake, then hpo worker fake",
        ),
        ({"counts": {"open": 0, "running": 0, "done": 2}}, "fake: 2 of 2 trials ended"),
    ],
)
def test_a_status_names_the_next_command(changes: dict[str, Any], said: str) -> None:
    record = record_of([], **changes)
    lines = [str(part) for part in screens.status(record, study_status(record))]
    assert said in lines
    assert sum("hpo worker" in line for line in lines) == (0 if "counts" in changes else 1)


@pytest.mark.parametrize(
    ("state", "shown"), [("open", "unfinished"), ("done", "finished"), ("paused", "paused")]
)
def test_the_list_of_studies_has_plain_words(state: str, shown: str) -> None:
    trials = {"open": 2, "running": 0, "done": 4, "total": 6}
    parts = list(screens.overview([StudyOverview("s", state, trials, 0, 0.0, 60.0)]))
    (row,) = parts[0][1]
    assert (row["state"], row["trials ended"]) == (shown, "4 of 6")
