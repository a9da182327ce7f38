"""The charts of a study: each is defined once, as plain numbers, and drawn by two thin renderers.

plotly draws for the report and the dashboard, where a reader points at a trial to see what it was.
matplotlib draws the PNG files: plotly makes PNGs by running a Chrome browser, which a compute node
does not have.

Colours are those of Okabe and Ito (2008), told apart by people with any of the common colour-blindnesses.
A precision keeps its colour and its marker in every chart of every study.
"""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from hpo.tables import (
    OUTCOMES,
    best_trials,
    complete_trials,
    evaluations_table,
    format_metric,
    format_number,
    format_seconds,
    importance_table,
    num_top_trials,
    objective_column,
    pareto_front,
    precision_order,
    trials_table,
    why_no_importances,
)

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from hpo.study_record import StudyRecord

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
    "complete": "#009E73",
    "pruned": "#B8B8B8",
    "nonfinite": "#D55E00",
    "incompatible": "#CC79A7",
    "unsupported": "#56B4E9",
    "oom": "#E69F00",
    "failed": "#000000",
    "preempted": "#0072B2",
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
                    dashed=trial["outcome"] != "complete",
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


GRID_COLOR = "#E3E6EA"
TEXT_COLOR = "#22272E"
DASHES = {True: "dash", False: "solid"}
PLOTLY_STEPS = {"line": "linear", "steps_after": "hv", "steps_before": "vh"}
MATPLOTLIB_STEPS = {"line": "default", "steps_after": "steps-post", "steps_before": "steps-pre"}


def plotly_figure(chart: Chart, standalone: bool = True) -> go.Figure:
    """The chart for a browser: `standalone` with its title, at the size of whatever holds it.

    Names are escaped: plotly reads a part of HTML in every text.
    """
    import plotly.graph_objects as go

    figure = go.Figure()
    for series in chart.series:
        common: dict[str, Any] = {
            "name": html.escape(series.name),
            "x": list(series.x),
            "y": list(series.y),
            "legendgroup": html.escape(series.group or series.name),
            "showlegend": series.in_legend,
            "hovertext": list(series.hover) or None,
            "hoverinfo": "text" if series.hover else "name+y",
        }
        if series.draw == "bars":
            common["x"] = [end - start for start, end in zip(series.x_start, series.x, strict=True)]
            style: dict[str, Any] = {"marker_color": series.color, "width": chart.bar_width}
            figure.add_bar(**common, base=list(series.x_start), orientation="h", **style)
        elif series.draw == "points":
            triangle = series.markers[0].startswith("triangle")
            marker: dict[str, Any] = {
                "color": series.color,
                "symbol": series.markers[0],
                "size": 12 if triangle else 10,
            }
            marker |= {"opacity": 0.9, "line": {"width": 0.8, "color": "#333333"}}
            figure.add_scatter(**common, mode="markers", marker=marker)
        else:
            figure.add_scatter(
                **common,
                mode="lines+markers" if series.with_markers else "lines",
                marker={"symbol": series.markers[0], "size": 6},
                line={
                    "color": series.color,
                    "width": 1.8,
                    "dash": DASHES[series.dashed],
                    "shape": PLOTLY_STEPS[series.draw],
                },
            )
    axis = {"gridcolor": GRID_COLOR, "zeroline": False, "automargin": True, "linecolor": "#9AA4AF"}
    legend = {"orientation": "h", "x": 0, "xanchor": "left", "yanchor": "bottom"}
    figure.update_layout(
        template="none",
        barmode="overlay",
        font={"family": "system-ui, sans-serif", "size": 13, "color": TEXT_COLOR},
        hoverlabel={"align": "left"},
        xaxis={**axis, "title": {"text": html.escape(chart.x_label)} if chart.x_label else None},
        yaxis={**axis, "title": {"text": html.escape(chart.y_label)} if chart.y_label else None},
        paper_bgcolor="white",
        plot_bgcolor="white",
    )
    if standalone:
        figure.update_layout(
            title={"text": html.escape(chart.title), "x": 0.01},
            margin={"l": 8, "r": 12, "t": 48, "b": 8},
            legend={**legend, "yref": "container", "y": 0},
        )
    else:
        figure.update_layout(
            height=chart.height, margin={"l": 8, "r": 12, "t": 8, "b": 8}, legend={**legend, "y": 1.02}
        )
    if chart.x_log:
        figure.update_xaxes(type="log")
    if chart.x_ticks:
        figure.update_xaxes(**_category_axis(chart.x_ticks), showgrid=False)
    if chart.y_ticks:
        figure.update_yaxes(**_category_axis(chart.y_ticks), showgrid=False, tickfont_size=11)
    return figure


def _category_axis(names: Sequence[str]) -> dict[str, Any]:
    return {
        "tickmode": "array",
        "tickvals": list(range(len(names))),
        "ticktext": [html.escape(name) for name in names],
        "range": [-0.6, len(names) - 0.4],
    }


def png(chart: Chart) -> bytes:
    """The chart as a PNG of 1440 pixels width. Needs no display and no browser."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # A `$` in a metric's name is a dollar sign, not the start of a formula.
    with rc_context({"text.parse_math": False, "font.size": 11, "axes.edgecolor": "#9AA4AF"}):
        figure = Figure(figsize=(9, max(3.2, chart.height / 85)), dpi=160, layout="constrained")
        axes = figure.add_subplot()
        for series in chart.series:
            label = series.name if series.in_legend else None
            if series.draw == "bars":
                widths = [end - start for start, end in zip(series.x_start, series.x, strict=True)]
                style: dict[str, Any] = {"color": series.color, "height": chart.bar_width, "label": label}
                axes.barh(series.y, widths, left=series.x_start, **style)
            elif series.draw == "points":
                style = {"s": 52, "alpha": 0.9, "color": series.color, "marker": series.markers[1]}
                style |= {"edgecolors": "#333333"} if series.markers[1] != "x" else {}
                axes.scatter(series.x, series.y, label=label, linewidths=0.7, **style)
            else:
                axes.plot(
                    series.x,
                    series.y,
                    color=series.color,
                    linewidth=1.5,
                    linestyle="--" if series.dashed else "-",
                    drawstyle=MATPLOTLIB_STEPS[series.draw],
                    marker=series.markers[1] if series.with_markers else None,
                    markersize=4,
                    label=label,
                )
        axes.set(xlabel=chart.x_label, ylabel=chart.y_label)
        figure.suptitle(chart.title, x=0.01, horizontalalignment="left", fontsize=13)
        axes.set_axisbelow(True)
        axes.grid(True, axis="x" if chart.y_ticks else "y" if chart.x_ticks else "both", color=GRID_COLOR)
        axes.spines[["top", "right"]].set_visible(False)
        if chart.x_log:
            axes.set_xscale("log")
        if chart.x_ticks:
            axes.set_xticks(range(len(chart.x_ticks)), chart.x_ticks)
            axes.set_xlim(-0.6, len(chart.x_ticks) - 0.4)
        if chart.y_ticks:
            axes.set_yticks(range(len(chart.y_ticks)), chart.y_ticks)
            axes.set_ylim(-0.6, len(chart.y_ticks) - 0.4)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower left", ncols=min(6, max(1, len(labels))), frameon=False
        )
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    return buffer.getvalue()
