"""What a report shows of a comparison on new seeds, and of learning rates that fail."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from study_records import fake_record, fake_trial, tables_of

from hpo.report.charts import all_charts
from hpo.report.compared import configuration_table, precision_table
from hpo.report.dashboard import study_note
from hpo.report.failure_map import failure_map
from hpo.report.figures import plotly_figure, png
from hpo.report.page import report_html
from hpo.report.tables import StudyTables
from hpo.report.verdicts import forest, sentences, speed_and_quality, untrained, verdict_table
from hpo.study.study_record import TrialRecord

SENTENCE = "Use bf16: as good as fp32 (score within 0.5 points; paired, 5 new seeds) and 1.60 times as fast."


def row(precision: str, difference: float, **changes: Any) -> dict[str, Any]:
    return {
        "precision": precision,
        "question": "paired",
        "metric": "score",
        "verdict": "as_good",
        "difference": difference,
        "low": difference - 0.3,
        "high": difference + 0.3,
        "num_seeds": 5,
        "seeds_needed": None,
        "num_failed": 0,
        "speed_ratio": None,
        "speed_ratio_low": None,
        "speed_ratio_high": None,
        "is_noise_floor": False,
        **changes,
    }


def compared(*rows: dict[str, Any], **changes: Any) -> StudyTables:
    found = {"verdicts": rows, "recommendation": SENTENCE, "has_ended": True, "margin": 0.5, **changes}
    return StudyTables(dataclasses.replace(fake_record(), comparisons={"precisions": found}))


SPEED = {"speed_ratio": 1.6, "speed_ratio_low": 1.5, "speed_ratio_high": 1.7}
TABLES = compared(
    row("bf16", -0.1, **SPEED),
    row("bf16", 0.2, metric="topic/f1_macro", **SPEED),
    row("fp16", -2.0, verdict="worse"),
    row("fp32", 0.1, verdict="undecided", is_noise_floor=True),
)


def test_a_row_for_each_precision_of_the_metric_that_decides() -> None:
    chart = forest(TABLES)
    assert chart.y_ticks == ["fp32, other seeds", "fp16, paired", "bf16, paired"], "the first is drawn on top"
    intervals = {series.y[0]: [*series.x] for series in chart.series if series.draw == "line"}
    assert intervals[2] == pytest.approx([-0.4, 0.2])
    (margin,) = (series for series in chart.series if series.name == "margin")
    assert [*margin.x] == [-0.5, -0.5]


NOT_MEASURED = {"num_trials": 0, "underflow": None, "overflow": None}
NOT_MEASURED |= {"updates_lost": None, "skipped_steps": None}


def under(
    precision: str, reason: str = "", numerics: dict[str, Any] = NOT_MEASURED, **outcomes: int
) -> dict[str, Any]:
    return {
        "numerics": numerics,
        "precision": precision,
        "num_trials": sum(outcomes.values()),
        "outcomes": outcomes,
        "reason": reason,
    }


FAILED = compared(
    row("bf16", -0.1, **SPEED),
    {**row("fp16", 0.0, verdict="worse", num_failed=6), "difference": None, "low": None, "high": None},
    row("bf16-true", -0.4, verdict="undecided", seeds_needed=12, num_failed=1),
    row("fp32", 0.1, verdict="undecided", is_noise_floor=True, seeds_needed=30),
    precisions=[
        under("fp32", complete=6),
        under("bf16", complete=6),
        under("fp16", "the scale fell to its floor of `1`", nonfinite=5, oom=1),
        under("bf16-true", "lost & gone", complete=5, failed=1),
    ],
)


def test_a_precision_that_never_trained_is_seen_with_the_reason() -> None:
    why = "fp16: 6 of 6 trials have no score (5 nonfinite, 1 oom): the scale fell to its floor of `1`"
    assert untrained(FAILED)[0] == why
    chart = forest(FAILED)
    assert chart.y_ticks[2] == "fp16, paired"
    (text,) = (series for series in chart.series if series.draw == "text")
    assert (text.name, [*text.x], [*text.y]) == ("no fp16 trial has a score", [pytest.approx(-0.15)], [2])
    assert png(chart).startswith(b"\x89PNG")
    trace = next(trace for trace in plotly_figure(chart).data if trace.mode == "text")
    assert trace.text == "no fp16 trial has a score"
    assert why.replace("`", "\\`") in study_note(FAILED)


def test_failures_and_the_seeds_that_would_decide_are_in_the_table() -> None:
    table = verdict_table(FAILED)
    assert list(table["failed"]) == ["0", "6", "1", "0"]
    assert "speed" not in table, "it is of the precision, not of a metric"
    assert list(table["would decide"]) == ["–", "–", "12", "–"]


def test_one_row_for_each_precision_with_what_it_costs_and_loses() -> None:
    memory = {"memory_ratio": 0.7, "memory_ratio_low": 0.69, "memory_ratio_high": 0.71}
    numerics = {"underflow": 0.125, "overflow": 0.0, "updates_lost": 2e-5, "skipped_steps": 3.0}
    tables = compared(
        row("bf16", -0.1, **SPEED, **memory),
        row("bf16", -0.1, metric="topic/f1_macro", **SPEED, **memory),
        row("fp32", 0.1, is_noise_floor=True),
        precisions=[under("fp32", complete=6), under("bf16", "", numerics, complete=5, oom=1)],
    )
    assert precision_table(tables.record.comparisons["precisions"]).to_dict("list") == {
        "precision": ["fp32", "bf16"],
        "trained": ["6 of 6", "5 of 6"],
        "speed": ["–", "1.60\u00a0[1.50,\u00a01.70]"],
        "memory": ["–", "0.70\u00a0[0.69,\u00a00.71]"],
        "underflow": ["–", "12.5 %"],
        "overflow": ["–", "0 %"],
        "updates lost": ["–", "0.002 %"],
        "skipped steps": ["–", "3"],
    }
    assert "12.5 %" in report_html(tables, [])
    assert "| bf16 | 5 of 6 |" in study_note(tables)


CONFIGURATIONS = [
    {"trial": 4, "paired": True, "tuned": ["fp32"], "params": {"learning_rate": 3e-5, "batch_size": 8}},
    {"trial": 7, "paired": False, "tuned": ["bf16"], "params": {"learning_rate": 1e-4, "batch_size": 8}},
]


def test_the_configurations_are_named_with_what_differs() -> None:
    tables = compared(row("bf16", -0.1), configurations=CONFIGURATIONS)
    (table,) = (configuration_table(found) for found in tables.record.comparisons.values())
    assert table.to_dict("list") == {
        "trial": ["4", "7"],
        "compared": ["paired; tuned for fp32", "tuned for bf16"],
        "learning_rate": ["3e-05", "0.0001"],
    }
    alone = configuration_table({"configurations": CONFIGURATIONS[:1]})
    assert list(alone) == ["trial", "compared", "learning_rate", "batch_size"], "of one, all settings"
    assert "<td>tuned for bf16</td>" in report_html(tables, [])
    note = study_note(tables)
    assert "### Configurations that were compared\n\n| trial |" in note
    assert "| 7 | tuned for bf16 | 0.0001 |" in note


def test_speed_against_quality() -> None:
    (chart,) = speed_and_quality(TABLES)
    points = {series.name: (*series.x, *series.y) for series in chart.series if series.in_legend}
    assert points == {"fp32": (1.0, 0.0), "bf16": (1.6, -0.1)}


def test_what_was_not_compared_says_so() -> None:
    tables = StudyTables(fake_record())
    assert sentences(tables) == []
    assert verdict_table(tables).empty
    assert forest(tables).absent == "Precisions were not compared on new seeds: hpo compare fake"
    assert speed_and_quality(compared(row("bf16", 0.0)))[0].absent.startswith(
        "No pair of trials tells the speed"
    )
    assert "verdicts" not in {chart.key for chart in all_charts(tables)}
    assert "Verdict" not in report_html(tables, [])


def test_page_and_dashboard_begin_with_the_verdict() -> None:
    page, note = report_html(TABLES, all_charts(TABLES)), study_note(TABLES)
    first = [
        SENTENCE,
        '<div id="verdicts"',
        '<div id="verdicts_speed"',
        "noise floor",
        "40 trials,",
        "<h2>Best",
    ]
    places = [page.index(text) for text in first]
    assert places == sorted(places), "the page opens with the verdict and its charts"
    assert page.count('<div id="verdicts"') == 1
    assert "noise floor" in page
    assert note.index("Use bf16: as good as fp32") < note.index("## Best")
    going = compared(row("bf16", -0.1), has_ended=False)
    assert sentences(going) == [f"{SENTENCE} (the comparison goes on)"]


def at_rate(number: int, precision: str, rate: float, outcome: str = "complete") -> TrialRecord:
    trial = fake_trial(number, precision, outcome)
    trial.params["learning_rate"] = rate
    return trial


def test_rates_that_fail() -> None:
    rates = {"fp32": (1e-5, 1e-4, 1e-3), "fp16": (1e-5, 1e-4)}
    trials = [
        at_rate(number, precision, rate)
        for number, (precision, rate) in enumerate((name, rate) for name in rates for rate in rates[name])
    ]
    chart = failure_map(tables_of([*trials, at_rate(5, "fp16", 1e-3, "nonfinite")]))
    shown = {series.name: len(series.x) for series in chart.series}
    assert shown["nonfinite"] == 1
    assert "fp16: trained from 1e-05 to 0.0001 and failed at 0.001; no trial lies between" in chart.caption
    assert "fp32: trained from 1e-05 to 0.001; between them 0 of 1 failed, so with 95 %" in chart.caption


def test_a_share_that_fails_is_of_the_rates_strictly_within_the_range() -> None:
    """Those at the ends trained by construction."""
    rates = (1e-5, 1e-5, 3e-5, 5e-5, 1e-4, 1e-4)
    trials = [at_rate(number, "fp16", rate) for number, rate in enumerate(rates)]
    caption = failure_map(tables_of([*trials, at_rate(6, "fp16", 7e-5, "nonfinite")])).caption
    assert "between them 1 of 3 failed, so with 95 % at most 86%." in caption
    caption = failure_map(tables_of([*trials, at_rate(6, "fp16", 1e-4, "nonfinite")])).caption
    assert "and failed at 0.0001; between them 0 of 2 failed, so with 95 % at most 78%." in caption


def test_no_rate_is_searched() -> None:
    trials = [at_rate(number, "fp32", 1e-4) for number in range(3)]
    assert failure_map(tables_of(trials)).absent == "The study does not search the learning rate."
