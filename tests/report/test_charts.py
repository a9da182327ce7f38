from __future__ import annotations

import dataclasses
from itertools import combinations
from typing import Any

import pytest
from support.study_records import fake_record, fake_tables, fake_trial, tables_of, with_values

from hpo.precision.table import PRECISION_NAMES
from hpo.report.charts import (
    MAX_CURVES,
    PRECISION_STYLES,
    Chart,
    Series,
    all_charts,
    history,
    learning_curves,
    metric_throughput,
    objectives,
    precision_metric,
)
from hpo.report.tables import StudyTables


def points(chart: Chart) -> int:
    return sum(len(series.x) for series in chart.series if series.draw == "points")


def series(chart: Chart, name: str) -> Series:
    return next(series for series in chart.series if series.name == name)


def test_every_precision_has_a_look_of_its_own() -> None:
    assert set(PRECISION_STYLES) == set(PRECISION_NAMES)
    for one, other in combinations(PRECISION_STYLES.values(), 2):
        (one_color, one_markers), (other_color, other_markers) = one, other
        assert one_color != other_color
        assert one_markers != other_markers


@pytest.mark.parametrize(("direction", "best_of"), [("maximize", max), ("minimize", min)])
def test_history_shows_complete_trials_and_the_best_so_far(direction: str, best_of: Any) -> None:
    record = dataclasses.replace(fake_record(), directions=(direction,))
    chart = history(StudyTables(record))
    scores = {trial.number: trial.values[0] for trial in record.trials if trial.values}
    assert points(chart) == len(scores)
    best = series(chart, "best so far")
    assert list(best.x) == list(scores)
    assert list(best.y) == [best_of(list(scores.values())[: index + 1]) for index in range(len(scores))]


def test_metric_by_precision_leaves_out_what_ran_something_else() -> None:
    chart, trials = precision_metric(fake_tables()), fake_tables().trials
    counts = trials.query("outcome == 'complete' and counts")["precision"].value_counts()
    assert list(chart.x_ticks) == [f"{name} (n = {counts[name]})" for name in ("fp32", "bf16", "fp16")]
    assert points(chart) == counts.sum()


def test_throughput_front_is_what_no_other_trial_beats() -> None:
    (chart,) = metric_throughput(fake_tables())
    shown = [point for s in chart.series if s.draw == "points" for point in zip(s.x, s.y, strict=True)]
    front = series(chart, "Pareto front")
    for x, y in zip(front.x, front.y, strict=True):
        assert not [1 for other_x, other_y in shown if other_x > x and other_y > y]
    assert "3 left out" in chart.caption
    assert len(shown) == 24


def test_learning_curves_follow_the_evaluations_and_are_capped() -> None:
    record = fake_record()
    chart = learning_curves(StudyTables(record))
    assert len(chart.series) == MAX_CURVES
    assert f"{MAX_CURVES} best of 32" in chart.caption
    best = max((trial for trial in record.trials if trial.values), key=lambda trial: trial.values)
    assert [row.epoch for row in best.evaluations] in [list(series.x) for series in chart.series]
    assert sum(series.in_legend for series in chart.series) == 3


def test_two_objectives_are_drawn_against_each_other_with_bytes_as_gib() -> None:
    trials = [with_values(number, (0.5 + number / 100, (number + 1) * 2**28)) for number in range(12)]
    metrics, directions = ("score", "peak_memory_bytes"), ("maximize", "minimize")
    tables = tables_of(trials, metric_names=metrics, directions=directions)
    chart = objectives(tables)
    assert chart.y_label == "peak memory (GiB), minimize"
    assert max(max(series.y) for series in chart.series) < 10
    keys = [chart.key for chart in all_charts(tables)]
    assert keys[0] == "objectives"
    assert {"history", "history_2", "metric_throughput"} <= set(keys)
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("metrics", "keys"),
    [
        (("score", "train_examples_per_second"), ["objectives"]),
        (("train_examples_per_second",), []),
        (
            ("score", "peak_memory_bytes", "train_tokens_per_second"),
            ["objectives"],
        ),
    ],
)
def test_no_chart_shows_an_objective_against_throughput_twice(
    metrics: tuple[str, ...], keys: list[str]
) -> None:
    trial = dataclasses.replace(fake_trial(0, "fp32"), values=(1.0,) * len(metrics))
    tables = tables_of([trial], metric_names=metrics, directions=("maximize",) * len(metrics))
    drawn = [chart.key for chart in all_charts(tables)]
    assert [key for key in drawn if key.startswith(("objectives", "metric_throughput"))] == keys
