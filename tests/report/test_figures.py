from __future__ import annotations

import json

import pytest
from study_records import fake_tables

from hpo.report.charts import history
from hpo.report.figures import plotly_figure


@pytest.mark.parametrize("standalone", [True, False])
def test_plotly_draws_the_same_numbers(standalone: bool) -> None:
    chart = history(fake_tables())
    figure = json.loads(plotly_figure(chart, standalone).to_json())
    assert [trace["x"] for trace in figure["data"]] == [list(series.x) for series in chart.series]
    assert [trace["y"] for trace in figure["data"]] == [list(series.y) for series in chart.series]
    assert ("title" in figure["layout"]) == standalone
