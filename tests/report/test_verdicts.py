import dataclasses
from typing import Any

import pytest
from support.planted_comparison import judged, search_config
from support.study_records import fake_record

from hpo.compare.planning import Request
from hpo.json_safe import json_safe
from hpo.report.best_screens import split_warnings
from hpo.report.caveats import caveats
from hpo.report.dashboard import study_note
from hpo.report.report import report_html
from hpo.report.tables import StudyTables
from hpo.report.verdicts import VERDICT_COLUMNS, configuration_table, recommendations, verdict_table

PRECISIONS = ("fp32", "bf16", "fp16", "bf16-true")


def score(params: dict[str, Any]) -> float:
    """Score with a loss of two points in fp16, and better seeds."""
    lucky = params.get("seed", 0) % 3 + (params["learning_rate"] == 3e-5)
    return 80.0 + lucky - 2.0 * (params["fp_precision"] == "fp16")


@pytest.fixture(scope="module")
def found() -> Any:
    return json_safe(judged(search_config(), score, Request(precisions=PRECISIONS, top=2)).content)


@pytest.fixture
def tables(found: Any) -> StudyTables:
    return StudyTables(dataclasses.replace(fake_record(), comparisons={found["question"]: found}))


def test_a_row_for_each_precision_with_its_evidence(found: Any) -> None:
    rows = verdict_table(found)
    assert [row["precision"] for row in rows] == ["bf16", "fp16", "bf16-true"]
    assert [row["verdict"] for row in rows] == ["as good", "worse", "as good"]
    assert [row["runs"] for row in rows] == ["18", "12", "18"]
    assert {row["collapsed"] for row in rows} == {"0"}
    assert {row["baseline"] for row in rows} == {"0"}
    assert rows[0]["speed"].startswith("2.00")
    assert [*rows[0]] == VERDICT_COLUMNS
    assert [*configuration_table(found)[0]] == ["trial", "learning_rate"]


def test_page_and_dashboard_begin_with_the_verdict(tables: StudyTables, found: Any) -> None:
    page, note = report_html(tables), study_note(tables)
    (text,) = recommendations(tables.record)
    assert text == found["recommendation"]
    places = [page.index(part) for part in (text, '<div id="verdicts"', "<h2>Best")]
    assert places == sorted(places)
    assert note.index("Use bf16: as good as fp32") < note.index("## Best")
    for shown in (page, note):
        assert found["verdicts"][0]["sentence"].split(":")[0] in shown
    unfinished = dataclasses.replace(tables.record, comparisons={"precisions": {**found, "has_ended": False}})
    assert recommendations(unfinished) == [f"{text} (the comparison goes on)"]


def test_a_choice_on_the_test_split_is_named(tables: StudyTables) -> None:
    (text,) = split_warnings(tables.record)
    assert text.startswith("`hpo compare` chose between fp32 and bf16, fp16, bf16-true on the test split")
    assert text in {notice.text for notice in caveats(tables)}
