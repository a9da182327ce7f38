from __future__ import annotations

from detailed_documents import (
    class_row,
    nothing_known,
    single_label,
    task_document,
)

from hpo.report.detailed_charts import confusion_chart
from hpo.report.detailed_tables import confusions_text
from hpo.report.figures import Chart, plotly_figure


def drawn(chart: Chart | None) -> Chart:
    assert chart is not None
    return chart


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


def test_of_many_classes_the_most_frequent_confusions_are_a_table() -> None:
    labels = [f"c{at}" for at in range(150)]
    counts = [[at, at, 500] for at in range(150)] + [[at, (at + 1) % 150, 1 + at] for at in range(150)]
    found = task_document("single_label", {}, confusion={"labels": labels, "counts": counts})
    assert confusion_chart(found, "k", "t") is None
    table = confusions_text(found)
    assert table.iloc[:2].to_numpy().tolist() == [["c149", "c0", "150"], ["c148", "c149", "149"]]
    assert len(table) == 20


def test_class_names_are_escaped() -> None:
    found = single_label([f"<class> {at}" for at in range(10)])
    chart = drawn(confusion_chart(found, "k", "<class>"))
    assert "<class>" not in plotly_figure(chart, standalone=False).to_json()


def test_an_unknown_confusion_is_not_drawn() -> None:
    for of_task in nothing_known()["tasks"].values():
        assert confusion_chart(of_task, "k", "t") is None
