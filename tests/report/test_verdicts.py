from __future__ import annotations

import dataclasses
from typing import Any

from support.planted_comparison import search_config, told
from support.study_records import fake_record

from hpo.compare.planning import Request
from hpo.json_safe import json_safe
from hpo.report.caveats import caveats
from hpo.report.charts import all_charts
from hpo.report.dashboard import study_note
from hpo.report.page import report_html
from hpo.report.tables import StudyTables
from hpo.report.verdicts import (
    chosen_on_test,
    configuration_table,
    forest,
    sentences,
    verdict_table,
)

PRECISIONS = ("fp32", "bf16", "fp16", "bf16-true")


def score(params: dict[str, Any]) -> float:
    """fp16 loses two points, and some seeds are better than others."""
    lucky = params.get("seed", 0) % 3 + (params["learning_rate"] == 3e-5)
    return 80.0 + lucky - 2.0 * (params["fp_precision"] == "fp16")


def compared(request: Request, **how: Any) -> tuple[Any, StudyTables]:
    """What a comparison stores, and the tables of a study that has it."""
    found = json_safe(told(search_config(), score, request, **how).content)
    return found, StudyTables(dataclasses.replace(fake_record(), comparisons={found["question"]: found}))


FOUND, TABLES = compared(Request(precisions=PRECISIONS, top=2))


def test_a_row_for_each_precision_with_what_it_rests_on() -> None:
    table = verdict_table(FOUND)
    assert list(table["precision"]) == ["bf16", "fp16", "bf16-true"]
    assert list(table["verdict"]) == ["as good", "worse", "as good"]
    assert list(table["runs"]) == ["6", "6", "6"]
    assert list(table["collapsed"]) == ["0 (≤ 39 %)", "0 (≤ 39 %)", "0 (≤ 39 %)"]
    assert table["speed"][0] == "2.00\u00a0[2.00,\u00a02.00]"
    chart = forest("precisions", FOUND)
    assert chart.y_ticks == ["bf16-true", "fp16", "bf16"], "the first is drawn on top"
    assert set(table["baseline"]) == {"0"}
    (margin,) = (series for series in chart.series if series.name == "margin")
    assert [*margin.x] == [-0.5, -0.5]


def test_configurations_are_named_with_what_differs() -> None:
    table = configuration_table(FOUND)
    assert list(table) == ["trial", "learning_rate"]
    one, _ = compared(Request(top=1))
    assert "learning_rate" in configuration_table(one), "of one, all settings"


def test_page_and_dashboard_begin_with_the_verdict() -> None:
    page, note = report_html(TABLES, all_charts(TABLES)), study_note(TABLES)
    (sentence,) = sentences(TABLES)
    assert sentence == FOUND["recommendation"]
    first = [
        sentence,
        '<div id="verdicts"',
        "This holds only if fewer than",
        "<h2>Best",
    ]
    places = [page.index(text) for text in first]
    assert places == sorted(places), "the page opens with the verdict and its charts"
    for told_here in (page, note):
        assert "These 6 runs do not exclude 39 %" in told_here
    assert note.index("Use bf16: as good as fp32") < note.index("## Best")
    going = dataclasses.replace(TABLES.record, comparisons={"precisions": {**FOUND, "has_ended": False}})
    assert sentences(StudyTables(going)) == [f"{sentence} (the comparison goes on)"]


def test_the_test_split_that_was_chosen_on_is_named() -> None:
    (text,) = chosen_on_test(TABLES.record)
    assert text.startswith(
        "The test split has been used to choose between fp32 and bf16, fp16, bf16-true (`hpo compare`)"
    )
    assert text in {notice.text for notice in caveats(TABLES)}
    assert chosen_on_test(fake_record()) == []


def test_what_was_not_compared_says_so() -> None:
    tables = StudyTables(fake_record())
    assert sentences(tables) == []
    assert "verdicts" not in {chart.key for chart in all_charts(tables)}
    assert "Verdict" not in report_html(tables, [])
