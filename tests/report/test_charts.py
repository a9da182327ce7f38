import dataclasses
from typing import Any

import pytest
from support.study_records import fake_record, fake_tables, fake_trial, tables_of, with_values

from hpo.report.charts import Chart, history, metric_throughput, objectives, parallel_coordinates, slices
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
    (chart,) = history(StudyTables(record))
    scores = {trial.number: trial.values[0] for trial in record.trials if trial.values}
    hollow = [trace for trace in chart.figure.data if trace.marker.symbol and "open" in trace.marker.symbol]
    last = {
        trial.number: trial.evaluations[-1].metrics["score"]
        for trial in record.trials
        if trial.evaluations and not trial.values
    }
    assert sorted(points(chart)) == sorted((scores | last).items())
    assert {x: y for trace in hollow for x, y in zip(trace.x, trace.y, strict=True)} == last
    assert {outcome for trial in record.trials if (outcome := trial.outcome) and trial.number in last} >= {
        "pruned"
    }
    assert "Hollow: the last value of 5 trials not complete." in chart.caption
    best = line(chart, "best so far")
    assert list(best.x) == list(scores)
    assert list(best.y) == [best_of(list(scores.values())[: index + 1]) for index in range(len(scores))]


def test_metric_by_precision_omits_fallbacks() -> None:
    chart = next(slices(fake_tables()))
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
    assert ("The line is" in next(history(tables)).caption) == bool(front)
    met, page = sum(not value for value in excess), " ".join(report_html(tables).split())
    limited = " within all limits" if met < 3 else ""
    assert (f"{len(front)} of {met} complete trials{limited} are on the Pareto front" in page) == bool(front)
    assert "of 3 complete trials are on the Pareto front" not in page or met == 3


def test_titles_and_names_are_escaped() -> None:
    trial = fake_trial(0, "fp32")
    trial.params["encoder"] = "<b>"
    figure = next(history(tables_of([trial], metric_names=("<i>",)))).with_title()
    assert figure.layout.xaxis.dtick == 1, "there is no trial 0.5"
    assert figure.layout.title.text == "&lt;i&gt; by trial"
    assert "<b>" not in figure.data[0].hovertext[0]


def test_only_pruned_trials_have_a_chart() -> None:
    tables = tables_of([fake_trial(0, "fp32", "pruned"), fake_trial(1, "tf32", "pruned")])
    (chart,) = history(tables)
    assert len(points(chart)) == 2
    assert chart.caption.startswith("0 complete trials.")


def test_slices_show_each_setting_by_precision() -> None:
    record = fake_record()
    charts = {chart.title: chart for chart in slices(StudyTables(record))}
    names = ["precision", "batch_size", "head_type", "init_scale", "learning_rate"]
    assert list(charts) == [f"score by {name}" for name in names]
    counted = fake_tables().complete.query("counts")["number"]
    trials = [trial for trial in record.trials if trial.number in set(counted)]
    rates = charts["score by learning_rate"].figure
    for trace in rates.data:
        expected = {
            (t.params["learning_rate"], t.values[0]) for t in trials if t.params["fp_precision"] == trace.name
        }
        assert set(zip(trace.x, trace.y, strict=True)) == expected
    assert rates.layout.xaxis.type == "log"
    sizes = charts["score by batch_size"].figure.layout.xaxis.ticktext
    assert list(sizes) == [
        f"{n} (n = {sum(t.params['batch_size'] == n for t in trials)})" for n in (8, 16, 32)
    ]


def test_parallel_lines_pass_by_missing_settings() -> None:
    record = fake_record()
    (chart,) = parallel_coordinates(StudyTables(record))
    names = [*chart.figure.layout.xaxis.ticktext]
    assert names == ["batch_size", "head_type", "init_scale", "learning_rate", "score"]
    scores = [trial.values[0] for trial in record.trials if trial.values]
    for trace in chart.figure.data:
        trials = [
            trial for trial in record.trials if trial.values and trial.params["fp_precision"] == trace.name
        ]
        ends = [y for x, y in zip(trace.x, trace.y, strict=True) if x == names.index("score")]
        expected = [(trial.values[0] - min(scores)) / (max(scores) - min(scores)) for trial in trials]
        assert ends == pytest.approx(expected)
        assert (names.index("init_scale") in trace.x) == (trace.name == "fp16")
        assert sum(y != y for y in trace.y) == len(trials), "a gap after each"
    labels = {note.text for note in chart.figure.layout.annotations if note.x == 0}
    assert labels == {"8", "16", "32"}
