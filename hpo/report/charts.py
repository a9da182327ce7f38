"""The charts of a study as plain numbers: what is drawn. `figures.py` says how."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from hpo.outcome import Outcome
from hpo.report.figures import OTHER_STYLE, OUTCOME_COLORS, PRECISION_STYLES, Chart, Series
from hpo.report.formats import format_metric, format_number, format_seconds
from hpo.report.importances import compared_trials, importance_table, num_top_trials, why_no_importances
from hpo.report.tables import (
    OUTCOMES,
    differing_settings,
    evaluations_table,
    objective_column,
    precision_order,
    searched_parameters,
    trials_table,
)
from hpo.study.study_record import best_trials, complete_trials, pareto_front

if TYPE_CHECKING:
    from hpo.study.study_record import StudyRecord

LINE_COLOR = "#333333"
"""The colour of what is computed over several trials."""

MAX_CURVES = 24
"""More learning curves than this cannot be told apart; the best ones are drawn."""

MAX_TIMELINE_ROWS = 48
"""Up to here the timeline has one row per trial, beyond it one per worker."""

CHART_KEYS = (
    "history",
    "precision_metric",
    "metric_throughput",
    "objectives",
    "importances",
    "learning_curves_epochs",
    "learning_curves_seconds",
    "timeline",
)


def all_charts(record: StudyRecord, max_timeline_rows: int = MAX_TIMELINE_ROWS) -> list[Chart]:
    """Every chart of the report, in its order; those that cannot be drawn say why.

    Charts of one metric come once per objective, with its position in the key: `history`, `history_2`, ...
    """
    indices = range(len(record.metric_names))
    charts = [objectives(record)] if len(indices) > 1 else []
    for index in indices:
        charts += [history(record, index), precision_metric(record, index)]
        # Of the first two objectives, the chart of the objectives shows one against the other.
        shown = record.metric_names[:2] if index < 2 else record.metric_names[index : index + 1]
        if not {"train_examples_per_second", "train_tokens_per_second"} & set(shown):
            charts.append(metric_throughput(record, index))
    charts.append(importances(record))
    for index in indices:
        charts += [learning_curves(record, index, "epochs"), learning_curves(record, index, "seconds")]
    return [*charts, timeline(record, max_timeline_rows)]


def history(record: StudyRecord, index: int = 0) -> Chart:
    """The metric of every complete trial by trial number, and the best so far."""
    metric, direction = record.metric_names[index], record.directions[index]
    chart: dict[str, Any] = {"key": _key("history", index), "title": f"{metric} by trial"}
    rows = _complete_rows(record)
    if rows.empty:
        return Chart(**chart, absent="No trial is complete yet.")
    values = _shown(rows, metric)
    best = values.cummax() if direction == "maximize" else values.cummin()
    return Chart(
        **chart,
        x_label="trial number",
        y_label=_axis(metric)[1],
        series=[
            *_points(record, rows, rows["number"].astype(float), values),
            Series("best so far", LINE_COLOR, list(rows["number"]), list(best), "steps_after"),
        ],
        caption=f"{len(rows)} complete trials. The line is the best so far ({direction}).",
        x_whole=True,
    )


def precision_metric(record: StudyRecord, index: int = 0) -> Chart:
    """The metric of every complete trial by the precision that was requested and ran."""
    metric = record.metric_names[index]
    chart: dict[str, Any] = {"key": _key("precision_metric", index), "title": f"{metric} by precision"}
    rows = _complete_rows(record)
    rows = rows[rows["counts"].astype(bool)]
    if rows.empty:
        return Chart(**chart, absent="No complete trial ran the precision that it requested.")
    groups = _by_precision(rows)
    x, y = pd.Series(0.0, index=rows.index), _shown(rows, metric)
    medians = []
    for position, (_, group) in enumerate(groups):
        # Spread sideways so that equal values stay visible.
        spread = 0.18 if len(group) > 1 else 0.0
        x[group.index] = position + np.linspace(-spread, spread, len(group))
        line = [position - 0.3, position + 0.3], [float(y[group.index].median())] * 2
        medians.append(Series("median", LINE_COLOR, *line, "line", in_legend=position == 0))
    differing = ", ".join(differing_settings(rows))
    return Chart(
        **chart,
        y_label=_axis(metric)[1],
        series=[*_points(record, rows, x, y), *medians],
        x_ticks=[f"{precision} (n = {len(group)})" for precision, group in groups],
        caption=f"The trials differ in these settings too: {differing}." if differing else "",
    )


def metric_throughput(record: StudyRecord, index: int = 0) -> Chart:
    """Metric against training throughput with the trials that no other beats in both."""
    metric, direction = record.metric_names[index], record.directions[index]
    title = f"{metric} against training throughput"
    chart: dict[str, Any] = {"key": _key("metric_throughput", index), "title": title}
    complete = _complete_rows(record)
    rows = complete[complete["counts_for_speed"].astype(bool)]
    if rows.empty:
        return Chart(**chart, absent="No complete trial has a throughput that may be compared.")
    speed, values = rows["train_examples_per_second"].astype(float), _shown(rows, metric)
    front = rows[pareto_front(np.column_stack([speed, values]), ("maximize", direction))]
    caption = _front_caption(rows, front)
    if left_out := len(complete) - len(rows):
        caption += f" {left_out} left out: device shared, fell back, or no speed measured."
    return Chart(
        **chart,
        x_label="training throughput (examples/s)",
        y_label=_axis(metric)[1],
        series=[*_points(record, rows, speed, values), _front_line(front, speed, values, "maximize")],
        x_log=bool(speed.max() > 20 * speed.min() > 0),
        caption=caption,
    )


def objectives(record: StudyRecord) -> Chart:
    """The first two objectives against each other with the Pareto front of all objectives."""
    first, second = record.metric_names[:2]
    chart: dict[str, Any] = {"key": "objectives", "title": f"{second} against {first}"}
    rows = _complete_rows(record)
    if rows.empty:
        return Chart(**chart, absent="No trial is complete yet.")
    x, y = _shown(rows, first), _shown(rows, second)
    front = rows[rows["number"].isin([trial.number for trial in best_trials(record)])]
    series = _points(record, rows, x, y)
    if len(record.metric_names) == 2:
        series.append(_front_line(front, x, y, record.directions[0]))
    return Chart(
        **chart,
        x_label=f"{_axis(first)[1]}, {record.directions[0]}",
        y_label=f"{_axis(second)[1]}, {record.directions[1]}",
        series=series,
        caption=_front_caption(rows, front),
    )


def importances(record: StudyRecord) -> Chart:
    """PED-ANOVA importance of each searched parameter, one bar per metric."""
    chart: dict[str, Any] = {"key": "importances", "title": "Importance of the parameters"}
    if reason := why_no_importances(record):
        return Chart(**chart, absent=reason)
    table = importance_table(record)[::-1]
    colors = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
    num_metrics = len(record.metric_names)
    bar_width = 0.66 / num_metrics
    series = [
        Series(
            metric,
            colors[index % len(colors)],
            list(table[metric].astype(float)),
            [position - bar_width * (index - (num_metrics - 1) / 2) for position in range(len(table))],
            "bars",
            x_start=[0.0] * len(table),
            in_legend=num_metrics > 1,
            hover=[f"{name}: {share:.1%}" for name, share in table[["parameter", metric]].to_numpy()],
        )
        for index, metric in enumerate(record.metric_names)
    ]
    count = len(compared_trials(record))
    return Chart(
        **chart,
        x_label="share of importance",
        series=series,
        y_ticks=list(table["parameter"]),
        caption=f"PED-ANOVA: what sets the best {num_top_trials(count)} of {count} complete trials apart."
        + (" With so few trials the order is rough." if count < 50 else ""),
        bar_width=bar_width,
        height=110 + 34 * len(table),
    )


def learning_curves(record: StudyRecord, index: int, axis: Literal["epochs", "seconds"]) -> Chart:
    """The metric at every evaluation against epochs, or against seconds of the trial."""
    metric, direction = record.metric_names[index], record.directions[index]
    names = {"epochs": ("epoch", "epoch", "epoch"), "seconds": ("seconds", "time", "seconds in the trial")}
    column, by, x_label = names[axis]
    title = f"{metric} while training, by {by}"
    chart: dict[str, Any] = {"key": _key(f"learning_curves_{axis}", index), "title": title}
    evaluations = evaluations_table(record)
    if metric in evaluations:
        evaluations[metric] = pd.to_numeric(evaluations[metric])
        evaluations = evaluations.dropna(subset=[metric, column])
    if metric not in evaluations or evaluations.empty:
        return Chart(**chart, absent=f"No evaluation with `{metric}` is stored.")
    reached = evaluations.groupby("number")[metric].agg("max" if direction == "maximize" else "min")
    chosen = reached.sort_values(ascending=direction == "minimize").index[:MAX_CURVES]
    outcomes = trials_table(record).set_index("number")["outcome"]
    scale, y_label = _axis(metric)
    series: list[Series] = []
    for precision, group in _by_precision(evaluations[evaluations["number"].isin(chosen)]):
        color, markers = PRECISION_STYLES.get(precision, OTHER_STYLE)
        curves = list(group.sort_values("step").groupby("number"))
        # The first curve stands in the legend: a complete one, if any.
        curves.sort(key=lambda curve: outcomes[curve[0]] != Outcome.COMPLETE)
        for place, (number, curve) in enumerate(curves):
            trial = f"trial {number}, {precision}, {outcomes[number]}"
            series.append(
                Series(
                    precision,
                    color,
                    list(curve[column].astype(float)),
                    list(curve[metric].astype(float) / scale),
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
    return Chart(**chart, x_label=x_label, y_label=y_label, series=series, caption=caption)


def timeline(record: StudyRecord, max_rows: int = MAX_TIMELINE_ROWS) -> Chart:
    """When each trial ran, coloured by outcome: a row per trial, or per worker in a long study."""
    chart: dict[str, Any] = {"key": "timeline", "title": "Trials over time"}
    rows = trials_table(record).dropna(subset=["start_seconds"]).sort_values("number")
    if rows.empty:
        return Chart(**chart, absent="No trial has started.")
    starts, ends = rows["start_seconds"].astype(float), rows["end_seconds"].astype(float)
    now = max(starts.max(), ends.max())
    ends = ends.fillna(now)
    units = ((1.0, "seconds", 300), (60.0, "minutes", 3 * 3600), (3600.0, "hours", np.inf))
    scale, unit = next((scale, unit) for scale, unit, limit in units if now < limit)
    if len(rows) <= max_rows:
        labels = [f"{row.number}  {row.precision}" for row in rows.itertuples()]
        caption = "One row per trial: its number and the precision requested."
        positions = pd.Series(range(len(rows) - 1, -1, -1), index=rows.index)
    else:
        workers = sorted(rows["worker"].unique())
        labels = [worker or "worker not known" for worker in workers]
        caption = "One row per worker. Gaps are time without a trial."
        positions = len(workers) - 1 - rows["worker"].map(workers.index)
    series = [
        Series(
            outcome,
            OUTCOME_COLORS[outcome],
            list(ends[bars.index] / scale),
            list(positions[bars.index].astype(float)),
            "bars",
            x_start=list(starts[bars.index] / scale),
            hover=_hover(record, bars),
        )
        for outcome in OUTCOMES
        if len(bars := rows[rows["outcome"] == outcome])
    ]
    return Chart(
        **chart,
        x_label=f"{unit} since the first trial began",
        series=series,
        y_ticks=labels[::-1],
        caption=caption,
        height=170 + 19 * len(labels),
    )


def _complete_rows(record: StudyRecord) -> pd.DataFrame:
    numbers = [trial.number for trial in complete_trials(record)]
    trials = trials_table(record)
    return trials[trials["number"].isin(numbers)].sort_values("number")


def _axis(metric: str) -> tuple[float, str]:
    """What an objective's values are divided by for display, and the axis label: bytes become GiB."""
    if metric.endswith("_bytes"):
        return 2.0**30, f"{metric.removesuffix('_bytes').replace('_', ' ')} (GiB)"
    return 1.0, metric


def _shown(rows: pd.DataFrame, metric: str) -> pd.Series:
    return rows[objective_column(metric)].astype(float) / _axis(metric)[0]


def _by_precision(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    return sorted(rows.groupby("precision", sort=False), key=lambda pair: precision_order(pair[0]))


def _points(record: StudyRecord, rows: pd.DataFrame, x: pd.Series, y: pd.Series) -> list[Series]:
    """One series for each precision."""
    series = []
    for precision, group in _by_precision(rows):
        color, markers = PRECISION_STYLES.get(precision, OTHER_STYLE)
        places = list(x[group.index]), list(y[group.index])
        series.append(Series(precision, color, *places, markers=markers, hover=_hover(record, group)))
    return series


def _front_line(front: pd.DataFrame, x: pd.Series, y: pd.Series, x_direction: str) -> Series:
    order = x[front.index].sort_values().index
    steps: Any = "steps_before" if x_direction == "maximize" else "steps_after"
    return Series("Pareto front", LINE_COLOR, list(x[order]), list(y[order]), steps, dashed=True)


def _front_caption(rows: pd.DataFrame, front: pd.DataFrame) -> str:
    numbers = ", ".join(f"trial {number}" for number in front["number"])
    return f"{len(rows)} complete trials. On the Pareto front: {numbers}."


def _hover(record: StudyRecord, rows: pd.DataFrame) -> list[str]:
    texts = []
    for row in rows.to_dict("records"):
        ran = row["effective"] if isinstance(row["effective"], str) else "nothing"
        lines = [
            f"trial {row['number']}: {row['outcome']}",
            f"requested {row['precision']}, ran {ran}",
            *[f"{name} {format_metric(name, row[objective_column(name)])}" for name in record.metric_names],
            f"{format_number(row['train_examples_per_second'])} examples/s",
            f"took {format_seconds(row['seconds'])}",
        ]
        for name in searched_parameters(rows):
            value = row[f"param.{name}"]
            if not pd.isna(value):
                lines.append(f"{name} {format_number(value) if isinstance(value, float) else value}")
        texts.append("\n".join(lines))
    return texts


def _key(name: str, index: int) -> str:
    return name if index == 0 else f"{name}_{index + 1}"
