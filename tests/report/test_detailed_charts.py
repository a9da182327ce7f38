from __future__ import annotations

from typing import Any

import pytest
from detailed_documents import (
    class_row,
    document,
    every_kind,
    nothing_known,
    single_label,
    task_document,
)

from hpo.report.detailed_charts import (
    classes_chart,
    confusion_chart,
    intervals_chart,
    task_charts,
)
from hpo.report.detailed_tables import Detailed
from hpo.report.figures import Chart, plotly_figure


def detailed(found: dict[str, Any]) -> Detailed:
    return Detailed(6, "test", found)


def drawn(chart: Chart | None) -> Chart:
    assert chart is not None
    return chart


def test_each_metric_is_a_dot_in_its_interval() -> None:
    tasks = {"t": task_document("regression", {"r2": 0.4, "mae": 30.0})}
    chart = drawn(intervals_chart(detailed(document(tasks, score={"value": 0.7, "low": 0.65, "high": 0.8}))))
    assert chart.y_ticks == ["t r2", "score"]
    lines = [(list(one.x), list(one.y)) for one in chart.series if one.draw == "line"]
    assert lines == [([pytest.approx(0.37), pytest.approx(0.43)], [0, 0]), ([0.65, 0.8], [1, 1])]
    assert [(one.x[0], one.y[0]) for one in chart.series if one.draw == "points"] == [(0.4, 0), (0.7, 1)]
    assert "are in the table alone" in chart.caption


def test_classes_are_drawn_with_the_lowest_f1_on_top() -> None:
    rows = [class_row("good", 9, 10, 10), class_row("bad", 1, 4, 2), class_row("absent", 0, 0, 0)]
    chart = drawn(classes_chart(task_document("single_label", {}, classes=rows), "k", "t"))
    assert chart.y_ticks == ["good (10)", "bad (4)"]
    bars, precision, recall = chart.series
    assert list(bars.x) == [pytest.approx(0.9), pytest.approx(1 / 3)]
    assert (list(precision.x), list(recall.x)) == ([0.9, 0.5], [0.9, 0.25])


def test_of_many_classes_the_lowest_f1_are_drawn() -> None:
    rows = [class_row(f"c{at}", at, 150, 150) for at in range(150)]
    chart = drawn(classes_chart(task_document("single_label", {}, classes=rows), "k", "t"))
    assert chart.y_ticks[::-1] == [f"c{at} (150)" for at in range(30)]
    assert "The 30 lowest F1 of 150 classes" in chart.caption


def test_a_matrix_shows_the_share_of_each_true_class() -> None:
    confusion = {"labels": ["a", "b"], "counts": [[0, 0, 6], [0, 1, 2], [1, 1, 4]]}
    chart = drawn(confusion_chart(task_document("single_label", {}, confusion=confusion), "k", "t"))
    (cells,) = chart.series
    # Rows upwards: `a`, the first, is on top.
    found = zip(cells.x, cells.y, cells.texts, cells.shades, strict=True)
    assert list(found) == [(0, 1, "6", 0.75), (1, 1, "2", 0.25), (1, 0, "4", 1.0)]
    assert (list(chart.x_ticks), list(chart.y_ticks)) == (["1", "2"], ["2 b", "1 a"])
    (trace,) = plotly_figure(chart).data
    assert [list(row) for row in trace.z] == [[None, 1.0], [0.75, 0.25]]


def test_a_co_occurrence_is_a_share_of_the_rows_in_which_the_class_holds() -> None:
    confusion = {"labels": ["a", "b"], "counts": [[0, 0, 6], [0, 1, 4]]}
    rows = [class_row("a", 6, 8, 6), class_row("b", 0, 0, 4)]
    found = task_document("multi_label", {}, confusion=confusion, classes=rows)
    (cells,) = drawn(confusion_chart(found, "k", "t")).series
    assert list(cells.shades) == [0.75, 0.5]


def test_of_many_classes_the_most_frequent_confusions_are_bars() -> None:
    labels = [f"c{at}" for at in range(150)]
    counts = [[at, at, 500] for at in range(150)] + [[at, (at + 1) % 150, 1 + at] for at in range(150)]
    found = task_document("single_label", {}, confusion={"labels": labels, "counts": counts})
    chart = drawn(confusion_chart(found, "k", "t"))
    assert list(chart.y_ticks[::-1][:2]) == ["c149 → c0", "c148 → c149"]
    assert list(chart.series[0].x[::-1][:2]) == [150, 149]
    assert len(chart.y_ticks) == 20
    assert "the 20 most frequent of 150 pairs of 150 classes" in chart.caption


def charts_of(one: Detailed) -> list[Chart]:
    first = intervals_chart(one)
    return [*([first] if first else []), *(chart for task in one.tasks for chart in task_charts(one, task))]


def test_every_chart_can_be_drawn_under_a_key_of_its_own() -> None:
    classes = [f"<class> {at}" for at in range(40)]
    found = document({**every_kind()["tasks"], "many": single_label(classes)})
    charts = charts_of(detailed(found))
    keys = [chart.key for chart in charts]
    assert len(set(keys)) == len(keys) == 1 + 2 + 2 + 1 + 1 + 2
    for chart in charts:
        assert "<class>" not in plotly_figure(chart, standalone=False).to_json()


def test_nothing_is_drawn_of_what_is_not_known() -> None:
    assert charts_of(detailed(nothing_known())) == []
