from __future__ import annotations

import json
import math

import pytest
from support.study_records import fake_tables

from hpo.report.charts import history
from hpo.report.figures import Chart, Series, plotly_figure


@pytest.mark.parametrize("standalone", [True, False])
def test_plotly_draws_the_same_numbers(standalone: bool) -> None:
    chart = history(fake_tables())
    figure = json.loads(plotly_figure(chart, standalone).to_json())
    assert [trace["x"] for trace in figure["data"]] == [list(series.x) for series in chart.series]
    assert [trace["y"] for trace in figure["data"]] == [list(series.y) for series in chart.series]
    assert ("title" in figure["layout"]) == standalone


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [([0.1], 0.095, 0.105), ([0.1] * 3, 0.095, 0.105), ([0.0, 0.0], -0.05, 0.05), ([-2.0], -2.1, -1.9)],
)
def test_equal_values_get_a_narrow_axis(values: list[float], low: float, high: float) -> None:
    line = Series("a", "#000", list(range(len(values))), values, "line")
    layout = plotly_figure(Chart("key", "title", series=[line])).layout
    assert layout.yaxis.range == pytest.approx((low, high))
    assert layout.xaxis.range == (pytest.approx((-0.05, 0.05)) if len(values) == 1 else None)
    turned = plotly_figure(Chart("key", "title", series=[Series("a", "#000", values, [0, 1, 2])])).layout
    assert turned.xaxis.range == pytest.approx((low, high))
    assert turned.yaxis.range is None


def test_different_or_unknown_values_leave_the_axis_to_plotly() -> None:
    for values in ([0.1, 0.2], [math.nan], []):
        layout = plotly_figure(Chart("k", "t", series=[Series("a", "#000", [0, 1], values)])).layout
        assert layout.yaxis.range is None
    several = [Series("a", "#000", [0], [0.5]), Series("b", "#000", [1], [0.75])]
    assert plotly_figure(Chart("k", "t", series=several)).layout.yaxis.range is None


def test_one_trial_number_stands_between_whole_numbers() -> None:
    figure = plotly_figure(Chart("k", "t", series=[Series("a", "#000", [3], [0.5])], x_whole=True))
    assert figure.layout.xaxis.range == (2.5, 3.5)
