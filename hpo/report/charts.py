"""The charts of a study as plain numbers: what is drawn. `figures.py` says how.

Colours are those of Okabe and Ito (2008), told apart by people with any of the common colour-blindnesses.
A precision keeps its colour and its marker in every chart of every study.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from hpo.outcome import Outcome
from hpo.report.formats import format_metric, format_number, format_seconds
from hpo.report.importances import importance_table, num_top_trials, why_no_importances
from hpo.report.tables import OUTCOMES, evaluations_table, objective_column, precision_order, trials_table
from hpo.study.study_record import best_trials, complete_trials, pareto_front

if TYPE_CHECKING:
    from hpo.study.study_record import StudyRecord

PRECISION_STYLES = {
    # precision: (colour, plotly's marker, matplotlib's marker)
    "fp32": ("#0072B2", "circle", "o"),
    "tf32": ("#56B4E9", "square", "s"),
    "bf16": ("#D55E00", "diamond", "D"),
    "fp16": ("#E69F00", "triangle-up", "^"),
    "bf16-true": ("#CC79A7", "triangle-down", "v"),
    "fp8": ("#009E73", "pentagon", "p"),
}

OTHER_STYLE = ("#6B6B6B", "x-thin-open", "x")

OUTCOME_COLORS = {
    Outcome.COMPLETE: "#009E73",
    Outcome.PRUNED: "#B8B8B8",
    Outcome.NONFINITE: "#D55E00",
    Outcome.INCOMPATIBLE: "#CC79A7",
    Outcome.UNSUPPORTED: "#56B4E9",
    Outcome.OOM: "#E69F00",
    Outcome.CRASHED: "#882255",
    Outcome.FAILED: "#000000",
    Outcome.PREEMPTED: "#0072B2",
    "running": "#F0E442",
    "waiting": "#F0E442",
}

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


@dataclass(frozen=True)
class Series:
    """Points, a line, a staircase or horizontal bars, with one entry in the legend."""

    name: str
    color: str
    x: Sequence[float]
    y: Sequence[float]
    draw: Literal["points", "line", "steps_after", "steps_before", "bars"] = "points"
    x_start: Sequence[float] = ()
    """Where bars begin; they end at `x`."""
    markers: tuple[str, str] = ("circle", "o")
    hover: Sequence[str] = ()
    dashed: bool = False
    with_markers: bool = False
    group: str = ""
    """Series of one group share the legend entry of the first."""
    in_legend: bool = True


@dataclass(frozen=True)
class Chart:
    """One chart; `absent` says why it cannot be drawn, and then `series` is empty."""

    key: str
    title: str
    x_label: str = ""
    y_label: str = ""
    series: Sequence[Series] = ()
    caption: str = ""
    absent: str = ""
    x_ticks: Sequence[str] = ()
    """Names of the positions 0, 1, 2 ... where an axis holds categories."""
    y_ticks: Sequence[str] = ()
    x_log: bool = False
    bar_width: float = 0.72
    """In steps of the axis of categories."""
    height: int = 420
    """Pixels, of the interactive chart."""


@dataclass(frozen=True)
class _Group:
    """The rows of one precision, with its style."""

    precision: str
    rows: pd.DataFrame
    color: str = field(init=False)
    markers: tuple[str, str] = field(init=False)

    def __post_init__(self) -> None:
        color, plotly_marker, matplotlib_marker = PRECISION_STYLES.get(self.precision, OTHER_STYLE)
        object.__setattr__(self, "color", color)
        object.__setattr__(self, "markers", (plotly_marker, matplotlib_marker))


def all_charts(record: StudyRecord, max_timeline_rows: int = MAX_TIMELINE_ROWS) -> list[Chart]:
    """Every chart of the report, in its order; those that cannot be drawn say why.

    With several objectives, charts of one metric come once per metric, with the metric's position in
    the key: `history`, `history_2`, ...
    """
    charts: list[Chart] = []
    for index in range(len(record.metric_names)):
        charts.append(history(record, index))
        charts.append(precision_metric(record, index))
        if record.metric_names[index] not in ("train_examples_per_second", "train_tokens_per_second"):
            charts.append(metric_throughput(record, index))
    if len(record.metric_names) > 1:
        charts.insert(0, objectives(record))
    charts.append(importances(record))
    for index in range(len(record.metric_names)):
        charts.append(learning_curves(record, index, "epochs"))
        charts.append(learning_curves(record, index, "seconds"))
    charts.append(timeline(record, max_timeline_rows))
    return charts


def _axis(metric: str) -> tuple[float, str]:
    """What an objective's values are divided by for display, and the axis label: bytes become GiB."""
    if metric.endswith("_bytes"):
        return 2.0**30, f"{metric.removesuffix('_bytes').replace('_', ' ')} (GiB)"
    return 1.0, metric


def _shown(rows: pd.DataFrame, metric: str) -> pd.Series:
    return rows[objective_column(metric)].astype(float) / _axis(metric)[0]


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
            Series("best so far", "#333333", list(rows["number"]), list(best), "steps_after"),
        ],
        caption=f"{len(rows)} complete trials. The line is the best so far ({direction}).",
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
    series, medians = [], []
    for position, group in enumerate(groups):
        # Spread sideways so that equal values stay visible; the order is fixed, so reports are repeatable.
        offsets = np.linspace(-0.18, 0.18, len(group.rows)) if len(group.rows) > 1 else [0.0]
        series.append(
            Series(
                group.precision,
                group.color,
                [position + float(offset) for offset in offsets],
                list(_shown(group.rows, metric)),
                markers=group.markers,
                hover=_hover(record, group.rows),
            )
        )
        medians.append(float(_shown(group.rows, metric).median()))
    for position, median in enumerate(medians):
        line = [position - 0.3, position + 0.3]
        series.append(
            Series("median", "#333333", line, [median] * 2, "line", group="median", in_legend=position == 0)
        )
    return Chart(
        **chart,
        y_label=_axis(metric)[1],
        series=series,
        x_ticks=[f"{group.precision} (n = {len(group.rows)})" for group in groups],
        caption="Trials of one precision differ in all other parameters too.",
    )


def metric_throughput(record: StudyRecord, index: int = 0) -> Chart:
    """Metric against training throughput with the trials that no other beats in both."""
    metric, direction = record.metric_names[index], record.directions[index]
    chart: dict[str, Any] = {
        "key": _key("metric_throughput", index),
        "title": f"{metric} against training throughput",
    }
    rows = _complete_rows(record)
    num_complete = len(rows)
    rows = rows[rows["counts_for_speed"].astype(bool)]
    if rows.empty:
        return Chart(**chart, absent="No complete trial has a throughput that may be compared.")
    speed = rows["train_examples_per_second"].astype(float)
    values = _shown(rows, metric)
    is_front = pareto_front(np.column_stack([speed, values]), ("maximize", direction))
    on_front = rows[is_front].sort_values("train_examples_per_second")
    left_out = num_complete - len(rows)
    return Chart(
        **chart,
        x_label="training throughput (examples/s)",
        y_label=_axis(metric)[1],
        series=[
            *_points(record, rows, speed, values),
            Series(
                "Pareto front",
                "#333333",
                list(speed[on_front.index]),
                list(values[on_front.index]),
                "steps_before",
                dashed=True,
            ),
        ],
        x_log=bool(speed.max() > 20 * speed.min() > 0),
        caption=f"{len(rows)} complete trials. On the Pareto front: {_numbers(on_front)}."
        + (f" {left_out} left out: device shared, fell back, or no speed measured." if left_out else ""),
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
    front = front.loc[x[front.index].sort_values().index]
    series = _points(record, rows, x, y)
    if len(record.metric_names) == 2:
        draw: Literal["steps_before", "steps_after"] = (
            "steps_before" if record.directions[0] == "maximize" else "steps_after"
        )
        line = list(x[front.index]), list(y[front.index])
        series.append(Series("Pareto front", "#333333", *line, draw, dashed=True))
    return Chart(
        **chart,
        x_label=f"{_axis(first)[1]}, {record.directions[0]}",
        y_label=f"{_axis(second)[1]}, {record.directions[1]}",
        series=series,
        caption=f"{len(rows)} complete trials. On the Pareto front: {_numbers(front)}.",
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
            hover=[
                f"{name}: {share:.1%}" for name, share in zip(table["parameter"], table[metric], strict=True)
            ],
        )
        for index, metric in enumerate(record.metric_names)
    ]
    count = len(complete_trials(record))
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
    title = f"{metric} while training, by {'epoch' if axis == 'epochs' else 'time'}"
    chart: dict[str, Any] = {"key": _key(f"learning_curves_{axis}", index), "title": title}
    evaluations = evaluations_table(record)
    if metric not in evaluations:
        return Chart(**chart, absent=f"No evaluation with `{metric}` is stored.")
    column = "epoch" if axis == "epochs" else "seconds"
    evaluations[metric] = pd.to_numeric(evaluations[metric])
    evaluations = evaluations.dropna(subset=[metric, column])
    if evaluations.empty:
        return Chart(**chart, absent=f"No evaluation with `{metric}` is stored.")
    reached = evaluations.groupby("number")[metric].agg("max" if direction == "maximize" else "min")
    chosen = reached.sort_values(ascending=direction == "minimize").index[:MAX_CURVES]
    trials = trials_table(record).set_index("number")
    series, seen = [], set()
    shown = evaluations[evaluations["number"].isin(chosen)]
    for group in _by_precision(shown):
        for number, curve in group.rows.sort_values("step").groupby("number"):
            trial = trials.loc[number]
            text = f"trial {number}, {group.precision}, {trial['outcome']}"
            values = list(curve[metric].astype(float))
            series.append(
                Series(
                    group.precision,
                    group.color,
                    list(curve[column].astype(float)),
                    values,
                    "line",
                    markers=group.markers,
                    with_markers=True,
                    dashed=trial["outcome"] != Outcome.COMPLETE,
                    hover=[f"{text}<br>{metric} {format_number(value)}" for value in values],
                    group=group.precision,
                    in_legend=group.precision not in seen,
                )
            )
            seen.add(group.precision)
    several = len(reached) > len(chosen)
    return Chart(
        **chart,
        x_label="epoch" if axis == "epochs" else "seconds in the trial",
        y_label=_axis(metric)[1],
        series=series,
        caption=(
            f"The {len(chosen)} best of {len(reached)} trials. " if several else f"{len(reached)} trials. "
        )
        + "Dashed: not complete.",
    )


def timeline(record: StudyRecord, max_rows: int = MAX_TIMELINE_ROWS) -> Chart:
    """When each trial ran, coloured by outcome: a row per trial, or per worker in a long study."""
    chart: dict[str, Any] = {"key": "timeline", "title": "Trials over time"}
    rows = trials_table(record).dropna(subset=["start_seconds"]).sort_values("number")
    if rows.empty:
        return Chart(**chart, absent="No trial has started.")
    now = rows[["start_seconds", "end_seconds"]].astype(float).max().max()
    rows["end_seconds"] = rows["end_seconds"].astype(float).fillna(now)
    scale, unit = (
        (1.0, "seconds") if now < 300 else (60.0, "minutes") if now < 3 * 3600 else (3600.0, "hours")
    )
    if len(rows) <= max_rows:
        labels = [f"{row.number}  {row.precision}" for row in rows.itertuples()]
        caption = "One row per trial: its number and the precision requested."
        rows["position"] = range(len(rows) - 1, -1, -1)
    else:
        workers = sorted(rows["worker"].unique())
        labels = [worker or "worker not known" for worker in workers]
        caption = "One row per worker. Gaps are time without a trial."
        rows["position"] = [len(workers) - 1 - workers.index(worker) for worker in rows["worker"]]
    series = []
    for outcome in [name for name in OUTCOMES if (rows["outcome"] == name).any()]:
        bars = rows[rows["outcome"] == outcome]
        series.append(
            Series(
                outcome,
                OUTCOME_COLORS[outcome],
                list(bars["end_seconds"].astype(float) / scale),
                list(bars["position"].astype(float)),
                "bars",
                x_start=list(bars["start_seconds"].astype(float) / scale),
                hover=_hover(record, bars),
            )
        )
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


def _by_precision(rows: pd.DataFrame) -> list[_Group]:
    groups = rows.groupby("precision", sort=False)
    return [
        _Group(str(name), group) for name, group in sorted(groups, key=lambda pair: precision_order(pair[0]))
    ]


def _points(record: StudyRecord, rows: pd.DataFrame, x: pd.Series, y: pd.Series) -> list[Series]:
    return [
        Series(
            group.precision,
            group.color,
            list(x[group.rows.index]),
            list(y[group.rows.index]),
            markers=group.markers,
            hover=_hover(record, group.rows),
        )
        for group in _by_precision(rows)
    ]


def _hover(record: StudyRecord, rows: pd.DataFrame) -> list[str]:
    texts = []
    for row in rows.to_dict("records"):
        ran = row["effective"] if isinstance(row["effective"], str) else "nothing"
        lines = [f"trial {row['number']}: {row['outcome']}", f"requested {row['precision']}, ran {ran}"]
        lines += [
            f"{name} {format_metric(name, row[objective_column(name)])}" for name in record.metric_names
        ]
        lines.append(f"{format_number(row['train_examples_per_second'])} examples/s")
        lines.append(f"took {format_seconds(row['seconds'])}")
        lines += [
            f"{name.removeprefix('param.')} {format_number(value) if isinstance(value, float) else value}"
            for name, value in row.items()
            if name.startswith("param.") and name != "param.fp_precision" and not pd.isna(value)
        ]
        texts.append("<br>".join(html.escape(str(line)) for line in lines))
    return texts


def _numbers(rows: pd.DataFrame) -> str:
    return ", ".join(f"trial {number}" for number in rows["number"])


def _key(name: str, index: int) -> str:
    return name if index == 0 else f"{name}_{index + 1}"
