"""What a report shows of a comparison on new seeds, and of learning rates that fail."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from study_records import fake_record, fake_trial, tables_of

from hpo.report.charts import all_charts
from hpo.report.dashboard import study_note
from hpo.report.failure_map import failure_map
from hpo.report.page import report_html
from hpo.report.tables import StudyTables
from hpo.report.verdicts import forest, sentences, speed_and_quality, verdict_table
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
    assert page.index(SENTENCE) < page.index("<h2>Best</h2>")
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
    assert "fp16: trained from 1e-05 to 0.0001 and failed at 0.001; there 0 of 2 failed" in chart.caption
    assert "so with 95 % at most 78%" in chart.caption


def test_no_rate_is_searched() -> None:
    trials = [at_rate(number, "fp32", 1e-4) for number in range(3)]
    assert failure_map(tables_of(trials)).absent == "The study does not search the learning rate."
