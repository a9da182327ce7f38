"""The charts of a study as plain numbers: what is drawn. `figures.py` says how."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from hpo.outcome import Outcome
from hpo.report.figures import OTHER_STYLE, PRECISION_STYLES, Chart, Series
from hpo.report.formats import format_metric, format_number, format_seconds
from hpo.report.tables import (
    ON,
    StudyTables,
    differing_settings,
    group_order,
    objective_column,
    searched_parameters,
)
from hpo.report.verdicts import forests
from hpo.study.sampling.fronts import pareto_front

LINE_COLOR = "#333333"
"""The colour of what is computed over several trials."""

MAX_CURVES = 24
"""More learning curves than this cannot be told apart; the best ones are drawn."""


def all_charts(tables: StudyTables) -> list[Chart]:
    """The charts of the report that have something to show, in its order.

    Charts of one metric come once per objective, with its position in the key: `history`, `history_2`, ...
    """
    metrics = tables.record.metric_names
    charts = forests(tables)
    charts += [objectives(tables)] if len(metrics) > 1 else []
    for index in range(len(metrics)):
        charts += [history(tables, index), precision_metric(tables, index)]
    if not {"train_examples_per_second", "train_tokens_per_second"} & set(metrics):
        charts += metric_throughput(tables)
    charts += [learning_curves(tables, index) for index in range(len(metrics))]
    return [chart for chart in charts if chart.series]


def history(tables: StudyTables, index: int = 0) -> Chart:
    metric, direction = tables.record.metric_names[index], tables.record.directions[index]
    key, title = _key("history", index), f"{metric} by trial"
    rows = tables.complete
    if rows.empty:
        return Chart(key, title)
    values = _objective(rows, metric)
    met = values[rows["meets_limits"].eq(True)]
    best = met.cummax() if direction == "maximize" else met.cummin()
    return Chart(
        key,
        title,
        x_label="trial number",
        y_label=_label(metric),
        series=[
            *_points(rows, rows["number"].astype(float), values),
            Series("best so far", LINE_COLOR, list(rows["number"][met.index]), list(best), "steps_after"),
        ],
        caption=f"{len(rows)} complete trials. The line is the best so far ({direction}).",
        x_whole=True,
    )


def precision_metric(tables: StudyTables, index: int = 0) -> Chart:
    metric = tables.record.metric_names[index]
    key, title = _key("precision_metric", index), f"{metric} by precision"
    rows = tables.complete[tables.complete["counts"]]
    if rows.empty:
        return Chart(key, title)
    groups = _by_group(rows, tables.groups(rows))
    x, y = pd.Series(0.0, index=rows.index), _objective(rows, metric)
    for position, (_, group) in enumerate(groups):
        # Spread sideways so that equal values stay visible.
        spread = 0.18 if len(group) > 1 else 0.0
        x[group.index] = position + np.linspace(-spread, spread, len(group))
    ticks = [(group.replace(ON, "\non ").replace(", ", "\n"), len(points)) for group, points in groups]
    formats = ", ".join(["Groups: precision", *tables.formats.columns]) + ". "
    differing = ", ".join(differing_settings(rows))
    caption = f"The trials differ in these settings too: {differing}." if differing else ""
    return Chart(
        key,
        title,
        y_label=_label(metric),
        series=_points(rows, x, y),
        x_ticks=[f"{group} (n = {num})" for group, num in ticks],
        caption=(formats if tables.formats.columns else "") + caption,
    )


def metric_throughput(tables: StudyTables) -> list[Chart]:
    """The first objective against training throughput, with its Pareto front, on each kind of device."""
    title = f"{tables.record.metric_names[0]} against training throughput"
    return [
        _metric_throughput(tables, rows, f"metric_throughput{place}", title + on)
        for rows, place, on in _by_device(tables, tables.complete)
    ]


def _metric_throughput(tables: StudyTables, complete: pd.DataFrame, key: str, title: str) -> Chart:
    metric, direction = tables.record.metric_names[0], tables.record.directions[0]
    rows = complete[complete["counts_for_speed"]]
    if rows.empty:
        return Chart(key, title)
    speed, values = rows["train_examples_per_second"], _objective(rows, metric)
    front = rows[pareto_front(np.column_stack([speed, values]), ("maximize", direction))]
    caption = _front_caption(rows, front)
    if left_out := len(complete) - len(rows):
        caption += f" {left_out} left out: device shared, fell back, or no speed measured."
    return Chart(
        key,
        title,
        x_label="training throughput (examples/s)",
        y_label=_label(metric),
        series=[*_points(rows, speed, values), _front_line(front, speed, values, "maximize")],
        x_log=bool(speed.max() > 20 * speed.min() > 0),
        caption=caption,
    )


def objectives(tables: StudyTables) -> Chart:
    """The first two objectives against each other with the Pareto front of all objectives."""
    metrics, directions = tables.record.metric_names, tables.record.directions
    key, title = "objectives", f"{metrics[1]} against {metrics[0]}"
    rows = tables.complete
    if rows.empty:
        return Chart(key, title)
    x, y = _objective(rows, metrics[0]), _objective(rows, metrics[1])
    front = rows[rows["number"].isin([trial.number for trial in tables.best])]
    series = _points(rows, x, y)
    if len(metrics) == 2:
        series.append(_front_line(front, x, y, directions[0]))
    return Chart(
        key,
        title,
        x_label=f"{_label(metrics[0])}, {directions[0]}",
        y_label=f"{_label(metrics[1])}, {directions[1]}",
        series=series,
        caption=_front_caption(rows, front),
    )


def learning_curves(tables: StudyTables, index: int = 0) -> Chart:
    metric, direction = tables.record.metric_names[index], tables.record.directions[index]
    key, title, evaluations = _key("learning_curves", index), f"{metric} while training", tables.evaluations
    if metric in evaluations:
        evaluations = evaluations.dropna(subset=[metric, "epoch"])
    if metric not in evaluations or evaluations.empty:
        return Chart(key, title)
    reached = evaluations.groupby("number")[metric].agg("max" if direction == "maximize" else "min")
    chosen = reached.sort_values(ascending=direction == "minimize").index[:MAX_CURVES]
    outcomes = tables.trials.set_index("number")["outcome"]
    series: list[Series] = []
    shown = evaluations[evaluations["number"].isin(chosen)]
    for precision, group in _by_group(shown, shown["precision"]):
        color, markers = PRECISION_STYLES.get(precision, OTHER_STYLE)
        # The first curve stands in the legend: a complete one, if any.
        curves = sorted(group.groupby("number"), key=lambda curve: outcomes[curve[0]] != Outcome.COMPLETE)
        for place, (number, curve) in enumerate(curves):
            trial = f"trial {number}, {precision}, {outcomes[number]}"
            series.append(
                Series(
                    precision,
                    color,
                    list(curve["epoch"]),
                    list(_shown(curve[metric], metric)),
                    "line",
                    markers=markers,
                    with_markers=True,
                    dashed=outcomes[number] != Outcome.COMPLETE,
                    hover=[f"{trial}\n{metric} {format_metric(metric, value)}" for value in curve[metric]],
                    in_legend=place == 0,
                )
            )
    best = f"The {len(chosen)} best of " if len(reached) > len(chosen) else ""
    caption = f"{best}{len(reached)} trials. Dashed: not complete."
    return Chart(key, title, x_label="epoch", y_label=_label(metric), series=series, caption=caption)


def _label(metric: str) -> str:
    return f"{metric[: -len('_bytes')].replace('_', ' ')} (GiB)" if metric.endswith("_bytes") else metric


def _shown(values: pd.Series, metric: str) -> pd.Series:
    """In the unit of the metric's axis."""
    return values.astype(float) / (2**30 if metric.endswith("_bytes") else 1)


def _objective(rows: pd.DataFrame, metric: str) -> pd.Series:
    return _shown(rows[objective_column(metric)], metric)


def _by_group(rows: pd.DataFrame, groups: pd.Series) -> list[tuple[str, pd.DataFrame]]:
    return sorted(rows.groupby(groups), key=lambda pair: group_order(pair[0]))


def _by_device(tables: StudyTables, rows: pd.DataFrame) -> list[tuple[pd.DataFrame, str, str]]:
    """The rows of each kind of device, with what is added to their chart's key and title; one kind: all."""
    if len(tables.devices) < 2:
        return [(rows, "", "")]
    return [
        (rows[rows["device"].eq(device)], f"_device_{place}", f"{ON}{device}")
        for place, device in enumerate(tables.devices, 1)
    ]


def _points(rows: pd.DataFrame, x: pd.Series, y: pd.Series) -> list[Series]:
    series = []
    for precision, group in _by_group(rows, rows["precision"]):
        color, markers = PRECISION_STYLES.get(precision, OTHER_STYLE)
        places = list(x[group.index]), list(y[group.index])
        series.append(Series(precision, color, *places, markers=markers, hover=_hover(group)))
    return series


def _front_line(front: pd.DataFrame, x: pd.Series, y: pd.Series, x_direction: str) -> Series:
    order = x[front.index].sort_values().index
    line = list(x[order]), list(y[order])
    draw: Any = "steps_before" if x_direction == "maximize" else "steps_after"
    return Series("Pareto front", LINE_COLOR, *line, draw, dashed=True)


def _front_caption(rows: pd.DataFrame, front: pd.DataFrame) -> str:
    numbers = ", ".join(f"trial {number}" for number in front["number"])
    return f"{len(rows)} complete trials. On the Pareto front: {numbers}."


def _hover(rows: pd.DataFrame) -> list[str]:
    metrics = [column.removeprefix("objective.") for column in rows if column.startswith("objective.")]
    names, texts = searched_parameters(rows), []
    for row in rows.to_dict("records"):
        ran = "nothing" if pd.isna(row["effective"]) else row["effective"]
        lines = [
            f"trial {row['number']}: {row['outcome']}",
            f"requested {row['precision']}, ran {ran}",
            *[f"{metric} {format_metric(metric, row[objective_column(metric)])}" for metric in metrics],
            f"{format_number(row['train_examples_per_second'])} examples/s",
            f"took {format_seconds(row['seconds'])}",
        ]
        for name in names:
            value = row[f"param.{name}"]
            if not pd.isna(value):
                lines.append(f"{name} {format_number(value) if isinstance(value, float) else value}")
        texts.append("\n".join(lines))
    return texts


def _key(name: str, index: int) -> str:
    return name if index == 0 else f"{name}_{index + 1}"
