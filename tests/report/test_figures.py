from __future__ import annotations

import json

import pytest
from study_records import fake_tables

from hpo.report.charts import history, timeline
from hpo.report.figures import plotly_figure


@pytest.mark.parametrize("standalone", [True, False])
def test_plotly_draws_the_same_numbers(standalone: bool) -> None:
    chart = history(fake_tables())
    figure = json.loads(plotly_figure(chart, standalone).to_json())
    assert [trace["x"] for trace in figure["data"]] == [list(series.x) for series in chart.series]
    assert [trace["y"] for trace in figure["data"]] == [list(series.y) for series in chart.series]
    assert ("title" in figure["layout"]) == standalone


def test_plotly_bars_begin_and_end_where_the_chart_says() -> None:
    chart = timeline(fake_tables())
    for trace, bars in zip(plotly_figure(chart).data, chart.series, strict=True):
        assert (list(trace.base), list(trace.x)) == (bars.x_start, bars.x)
