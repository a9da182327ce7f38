import dataclasses
from typing import Any

import pytest
from support.study_records import fake_record, fake_tables, fake_trial, tables_of, with_values

from hpo.report.charts import Chart, history, metric_throughput, objectives, precision_metric
from hpo.report.report import report_html
from hpo.report.tables import StudyTables


def points(chart: Chart) -> list[tuple[float, float]]:
    traces = [trace for trace in chart.figure.data if trace.mode == "markers"]
    return [point for trace in traces for point in zip(trace.x, trace.y, strict=True)]


def line(chart: Chart, name: str) -> Any:
    return next(trace for trace in chart.figure.data if trace.name == name)


@pytest.mark.parametrize(("direction", "best_of"), [("maximize", max), ("minimize", min)])
def test_history_shows_complete_trials_and_the_best_so_far(direction: str, best_of: Any) -> None:
    record = dataclasses.replace(fake_record(), directions=(direction,))
    chart = history(StudyTables(record))
    scores = {trial.number: trial.values[0] for trial in record.trials if trial.values}
    assert sorted(points(chart)) == sorted(scores.items())
    best = line(chart, "best so far")
    assert list(best.x) == list(scores)
    assert list(best.y) == [best_of(list(scores.values())[: index + 1]) for index in range(len(scores))]


def test_metric_by_precision_omits_fallbacks() -> None:
    (chart,) = precision_metric(fake_tables())
    counts = fake_tables().trials.query("outcome == 'complete' and counts")["precision"].value_counts()
    ticks = [f"{name} (n = {counts[name]})" for name in ("fp32", "bf16", "fp16")]
    assert list(chart.figure.layout.xaxis.ticktext) == ticks
    assert len(points(chart)) == counts.sum()


def test_no_trial_beats_the_throughput_front() -> None:
    (chart,) = metric_throughput(fake_tables())
    front = line(chart, "Pareto front")
    for x, y in zip(front.x, front.y, strict=True):
        assert not [1 for other_x, other_y in points(chart) if other_x > x and other_y > y]
    assert "3 omitted" in chart.caption
    assert len(points(chart)) == 24


TWO_OBJECTIVES: dict[str, Any] = {"metric_names": ("score", "bytes"), "directions": ("maximize", "minimize")}


@pytest.mark.parametrize(
    ("excess", "front", "caption"),
    [
        ([0, 0, 0], [0, 1], "On the Pareto front: trial 0, 1."),
        ([0, 0.1, 0], [0], "On the Pareto front of the trials within all limits: trial 0."),
        ([0.1, 0.2, 0.3], [], "On the Pareto front of the trials within all limits: none."),
    ],
)
def test_pareto_front_is_of_trials_within_the_limits(
    excess: list[float], front: list[int], caption: str
) -> None:
    values = [(0.5, 1.0), (0.6, 2.0), (0.4, 3.0)]
    trials = [
        dataclasses.replace(with_values(number, values[number]), constraints={"f1": excess[number]})
        for number in range(3)
    ]
    tables = tables_of(trials, **TWO_OBJECTIVES)
    chart = objectives(tables)
    assert sorted(line(chart, "Pareto front").x) == [values[number][0] for number in front]
    assert chart.caption == f"3 complete trials. {caption}"
    assert ("The line is" in history(tables).caption) == bool(front)
    met, page = sum(not value for value in excess), " ".join(report_html(tables).split())
    limited = " within all limits" if met < 3 else ""
    assert (f"{len(front)} of {met} complete trials{limited} are on the Pareto front" in page) == bool(front)
    assert "of 3 complete trials are on the Pareto front" not in page or met == 3


def test_titles_and_names_are_escaped() -> None:
    trial = fake_trial(0, "fp32")
    trial.params["encoder"] = "<b>"
    figure = history(tables_of([trial], metric_names=("<i>",))).with_title()
    assert figure.layout.xaxis.dtick == 1, "there is no trial 0.5"
    assert figure.layout.title.text == "&lt;i&gt; by trial"
    assert "<b>" not in figure.data[0].hovertext[0]
