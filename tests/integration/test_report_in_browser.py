"""The report of a study, and the charts of its dashboard, in a real browser."""

import re
from pathlib import Path
from typing import Any

import pytest
from support.study_records import EXAMPLES_PER_SECOND, fake_record

from hpo.report.charts import all_charts
from hpo.report.report import write_report
from hpo.report.tables import StudyTables

UNKNOWN = re.compile(r"\b(nan|None|undefined|Infinity|inf)\b")
"""Texts of an unknown value that a page must not show."""


@pytest.mark.browser
@pytest.mark.parametrize("width", [1200, 400])
def test_report_draws_the_scores_of_all_trials(tmp_path: Path, chromium: Any, width: int) -> None:
    """The page fits into the window, asks for its own file alone and has nothing to complain of."""
    record = fake_record()
    values = [trial.values[0] for trial in record.trials if trial.values]
    path = write_report(record, tmp_path)
    page = chromium.new_page(viewport={"width": width, "height": 900})
    problems: list[object] = []
    requests: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(error))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_function("document.querySelectorAll('.js-plotly-plot .main-svg').length >= 8")
    assert f"{max(values):.4f}" in page.inner_text("body")
    for summary in page.locator("summary").all():
        summary.click()
    text = page.inner_text("body")
    assert not UNKNOWN.search(text), text[UNKNOWN.search(text).start() - 200 :]
    drawn = page.evaluate(
        "document.getElementById('history').data.map(each => [each.marker?.symbol ?? '', each.name, each.y])"
    )
    shown = (
        value
        for symbol, name, ys in drawn
        if name in EXAMPLES_PER_SECOND and "open" not in symbol
        for value in ys
    )
    assert sorted(shown) == pytest.approx(sorted(values))
    rights = (
        "[...document.querySelectorAll('.scroll, .js-plotly-plot')].map(e => e.getBoundingClientRect().right)"
    )
    assert max(page.evaluate(rights)) <= width
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert (problems, requests) == ([], [path.as_uri()])
    page.close()


@pytest.mark.browser
def test_titles_of_the_dashboard_are_above_the_legends(chromium: Any) -> None:
    page = chromium.new_page(viewport={"width": 560, "height": 450})
    for chart in all_charts(StudyTables(fake_record())):
        page.set_content(chart.with_title().to_html(default_height="450px"))
        page.wait_for_selector(".gtitle")
        legend, title = page.query_selector(".legend"), page.query_selector(".gtitle").bounding_box()
        if legend is not None:
            assert title["y"] >= 0
            assert title["y"] + title["height"] <= legend.bounding_box()["y"], chart.title
    page.close()
