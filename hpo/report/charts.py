"""Charts of a study, drawn by plotly in the report and the dashboard.

The colours are by Okabe and Ito (2008): people with the common colour-blindnesses can tell them apart.
"""

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from hpo.config.search_space import encode
from hpo.json_safe import is_number
from hpo.outcome import Outcome
from hpo.report.formats import format_cell, format_interval, format_metric, format_number, plural
from hpo.report.importances import importances
from hpo.report.tables import (
    ON,
    StudyTables,
    differing_settings,
    group_order,
    objective_column,
    searched_parameters,
)
from hpo.study.sampling.fronts import pareto_front

PRECISION_STYLES = {
    # precision: (colour, marker)
    "fp32": ("#0072B2", "circle"),
    "tf32": ("#56B4E9", "square"),
    "bf16": ("#D55E00", "diamond"),
    "fp16": ("#E69F00", "triangle-up"),
    "bf16-true": ("#CC79A7", "triangle-down"),
    "fp8": ("#009E73", "pentagon"),
}
_OTHER_STYLE = ("#6B6B6B", "x-thin-open")
_LINE_COLOR, _GRID_COLOR, _AXIS_COLOR, _TEXT_COLOR = "#333333", "#E3E6EA", "#9AA4AF", "#22272E"

MAX_CURVES = 24  # largest number of learning curves; the best ones are drawn


@dataclass(frozen=True)
class Chart:
    key: str
    title: str
    figure: go.Figure
    caption: str = ""

    def with_title(self) -> go.Figure:
        """Return the figure with its title, of the size of its container."""
        title = {"text": _text(self.title), "x": 0.01, "y": 1, "yanchor": "top", "pad": {"t": 12}}
        return go.Figure(self.figure).update_layout(title=title, height=None, margin_t=72)


def all_charts(tables: StudyTables) -> list[Chart]:
    """Return the charts of the report in its order. Those of one metric come once per objective."""
    metrics = tables.record.metric_names
    charts = forests(tables.record.comparisons)
    if not tables.complete.empty:
        charts += [objectives(tables)] if len(metrics) > 1 else []
        if not {"train_examples_per_second", "train_tokens_per_second"} & set(metrics):
            charts += metric_throughput(tables)
        charts += parallel_coordinates(tables)
    for plot in (history, importance_bars, slices, learning_curves):
        charts += [chart for index in range(len(metrics)) for chart in plot(tables, index)]
    return charts


def history(tables: StudyTables, index: int = 0) -> Iterator[Chart]:
    """Plot an objective by trial with the best so far. A trial that is not complete has its last value."""
    metric, direction = tables.record.metric_names[index], tables.record.directions[index]
    rows, stored, column = tables.complete, tables.evaluations, objective_column(metric)
    last = stored.dropna(subset=[metric]).groupby("number")[metric].last() if metric in stored else {}
    others = tables.trials.drop(rows.index)
    others = others.assign(**{column: others["number"].map(last)}).dropna(subset=[column])
    if rows.empty and others.empty:
        return
    values = _objective(rows, metric)
    met = values[rows["meets_limits"].eq(True)]
    best = met.cummax() if direction == "maximize" else met.cummin()
    line = _line("best so far", list(rows["number"][met.index]), list(best), shape="hv")
    hollow = list(_points(others, others["number"], _objective(others, metric)))
    for points in hollow:
        points["showlegend"] = False
        points["marker"]["symbol"] = points["marker"]["symbol"].removesuffix("-open") + "-open"
    traces = [*_points(rows, rows["number"], values), *hollow, line]
    figure = _figure(traces, "trial number", _label(metric))
    if tables.trials["number"].max() < 10:
        figure.update_xaxes(dtick=1)
    shown = f"The line is the best so far ({direction})" if len(met) else "None is within all limits"
    caption = f"{len(rows)} complete trials. {shown}."
    if hollow:
        caption += f" Hollow: the last value of {plural(len(others), 'trial')} not complete."
    yield Chart(_key("history", index), f"{metric} by trial", figure, caption)


def slices(tables: StudyTables, index: int = 0) -> Iterator[Chart]:
    """Plot an objective against precision and each other setting, of trials in their requested precision."""
    metric, rows = tables.record.metric_names[index], tables.complete[tables.complete["counts"]]
    groups = tables.groups(rows)
    labels = sorted(groups.unique(), key=group_order)
    names = [label.replace(ON, "\non ").replace(", ", "\n") for label in labels]
    settings = {"precision": _Setting(groups.map(labels.index).astype(float), names)} if labels else {}
    settings |= {name: _setting(tables, rows, name) for name in differing_settings(rows)}
    for num, (name, setting) in enumerate(settings.items()):
        x = setting.values.dropna()
        # Spread sideways so that equal choices stay visible.
        sizes = x.groupby(x).transform("size") - 1
        spread = 0.36 * (x.groupby(x).cumcount() / sizes.replace(0, np.nan) - 0.5).fillna(0)
        places = x + spread if setting.choices else x
        figure = _figure([*_points(rows.loc[x.index], places, _objective(rows, metric))], "", _label(metric))
        figure.update_xaxes(type=setting.axis, exponentformat="e")
        if setting.choices:
            ticks = [f"{choice} (n = {x.eq(at).sum()})" for at, choice in enumerate(setting.choices)]
            # Slanted to the left where they do not fit: to the right, plotly hides the last one.
            figure.update_xaxes(**_category_axis(ticks), autotickangles=[0, -45, -90])
        yield Chart(_key(f"slice_{num}" if num else "precision_metric", index), f"{metric} by {name}", figure)


class _Setting(NamedTuple):
    values: pd.Series  # numbers, or positions of choices
    choices: Sequence[str] = ()
    axis: str = "linear"


def _setting(tables: StudyTables, rows: pd.DataFrame, name: str) -> _Setting:
    values, entry = rows[f"param.{name}"], tables.search_space.get(name) or {}
    if "low" in entry:
        return _Setting(values.astype(float), axis="log" if entry.get("log") else "linear")
    choices = [*map(encode, entry.get("choices") or values.dropna().unique())]
    places = [choices.index(value) if value in choices else np.nan for value in values]
    return _Setting(pd.Series(places, rows.index, dtype=float), [*map(format_cell, choices)])


def parallel_coordinates(tables: StudyTables) -> Iterator[Chart]:
    """Plot each complete trial as a line. plotly's own type does not draw under the policy of the page."""
    rows, metrics = tables.complete, tables.record.metric_names
    axes = {name: _setting(tables, rows, name) for name in differing_settings(rows)}
    axes |= {metric: _Setting(_objective(rows, metric)) for metric in metrics if axes}
    points, labels = {len(axes): pd.Series(np.inf, rows.index)}, []
    for place, (values, choices, axis) in enumerate(axes.values()):
        heights = np.log(values) if axis == "log" else values
        points[place] = (heights - heights.min()) / ((heights.max() - heights.min()) or 1.0)
        shown = values.dropna().sort_values().drop_duplicates()
        for row, value in (shown if choices else shown.iloc[[0, -1]]).items():
            text = _text(choices[int(value)] if choices else format_number(value))
            labels.append({"x": place, "y": points[place][row], "text": text, "showarrow": False})
    # A line goes past settings that the trial lacks. The infinite height becomes a gap before the next trial.
    table = pd.concat(points).dropna().swaplevel().sort_index()
    traces = []
    for precision, group in _by_group(rows, rows["precision"]):
        line = table.loc[group.index].replace(np.inf, np.nan)
        trials, places = (line.index.get_level_values(level) for level in (0, 1))
        trace = _line(precision, [*places], [*line], color=PRECISION_STYLES.get(precision, _OTHER_STYLE)[0])
        texts = [f"trial {number}" for number in rows["number"][trials]]
        traces.append(trace | {"hovertext": texts, "hoverinfo": "text", "opacity": 0.7})
    figure = _figure(traces).update_layout(annotations=labels, yaxis_visible=False)
    figure.update_annotations(bgcolor="rgba(255, 255, 255, 0.8)", font_size=11)
    figure.update_xaxes(**_category_axis([*axes]) | {"showgrid": True, "autotickangles": [0, -90]})
    if axes:
        yield Chart("parallel", "Settings and results of trials", figure, f"{len(rows)} complete trials.")


def metric_throughput(tables: StudyTables) -> Iterator[Chart]:
    """Plot the first objective against training throughput, one chart for each kind of device."""
    metric, direction = tables.record.metric_names[0], tables.record.directions[0]
    has_several = len(tables.devices) > 1
    for place, device in enumerate(tables.devices if has_several else [""], 1):
        complete = tables.complete
        key, title = "metric_throughput", f"{metric} against training throughput"
        if has_several:
            complete = complete[complete["device"].eq(device)]
            key, title = f"{key}_device_{place}", f"{title}{ON}{device}"
        rows = complete[complete["counts_for_speed"]]
        if rows.empty:
            continue
        speed, values = rows["train_examples_per_second"], _objective(rows, metric)
        front = rows[pareto_front(np.column_stack([speed, values]), ("maximize", direction))]
        traces = [*_points(rows, speed, values), _front_line(front, speed, values, "maximize")]
        figure = _figure(traces, "training throughput (examples/s)", _label(metric))
        if speed.max() > 20 * speed.min() > 0:
            figure.update_xaxes(type="log")
        omitted = len(complete) - len(rows)
        reasons = f" {omitted} omitted: device shared, fell back, or no speed measured." if omitted else ""
        yield Chart(key, title, figure, _front_caption(rows, front) + reasons)


def objectives(tables: StudyTables) -> Chart:
    """Plot the first two objectives against each other, with the Pareto front of trials within the limits."""
    metrics, directions, rows = tables.record.metric_names, tables.record.directions, tables.complete
    x, y = _objective(rows, metrics[0]), _objective(rows, metrics[1])
    met = rows[rows["meets_limits"].eq(True)]
    front = met[met["number"].isin([trial.number for trial in tables.best])]
    traces = list(_points(rows, x, y))
    if len(metrics) == 2:
        traces.append(_front_line(front, x, y, directions[0]))
    x_label, y_label = (f"{_label(metrics[axis])}, {directions[axis]}" for axis in (0, 1))
    title = f"{metrics[1]} against {metrics[0]}"
    among = " of the trials within all limits" if len(met) < len(rows) else ""
    return Chart("objectives", title, _figure(traces, x_label, y_label), _front_caption(rows, front, among))


def learning_curves(tables: StudyTables, index: int = 0) -> Iterator[Chart]:
    """Plot an objective while training, of the best trials."""
    metric, direction = tables.record.metric_names[index], tables.record.directions[index]
    evaluations = tables.evaluations
    if metric not in evaluations:
        return
    evaluations = evaluations.dropna(subset=[metric, "epoch"])
    reached = evaluations.groupby("number")[metric].agg("max" if direction == "maximize" else "min")
    chosen = reached.sort_values(ascending=direction == "minimize").index[:MAX_CURVES]
    if chosen.empty:
        return
    outcomes = tables.trials.set_index("number")["outcome"]
    traces = []
    shown = evaluations[evaluations["number"].isin(chosen)]
    for precision, group in _by_group(shown, shown["precision"]):
        color, symbol = PRECISION_STYLES.get(precision, _OTHER_STYLE)
        # The first curve stands in the legend: a complete one, if any.
        curves = sorted(group.groupby("number"), key=lambda curve: outcomes[curve[0]] != Outcome.COMPLETE)
        for place, (number, curve) in enumerate(curves):
            trial = f"trial {number}, {precision}, {outcomes[number]}"
            texts = [_text(f"{trial}\n{metric} {format_metric(metric, value)}") for value in curve[metric]]
            is_dashed = outcomes[number] != Outcome.COMPLETE
            x, y = list(curve["epoch"]), list(_scaled(curve[metric], metric))
            line = _line(precision, x, y, color=color, dash="dash" if is_dashed else "solid")
            marker = {"symbol": symbol, "size": 6}
            line |= {"mode": "lines+markers", "marker": marker, "showlegend": place == 0}
            traces.append(line | {"hovertext": texts, "hoverinfo": "text"})
    best = f"The {len(chosen)} best of " if len(reached) > len(chosen) else ""
    caption = f"{best}{len(reached)} trials. Dashed: not complete."
    figure = _figure(traces, "epoch", _label(metric))
    yield Chart(_key("learning_curves", index), f"{metric} while training", figure, caption)


def importance_bars(tables: StudyTables, index: int = 0) -> Iterator[Chart]:
    metric, table = tables.record.metric_names[index], importances(tables, index).rename(index=_text)
    if table.empty:
        return
    colors = [_LINE_COLOR, _AXIS_COLOR]
    bars = px.bar(table, orientation="h", text_auto=".1%", color_discrete_sequence=colors).data
    figure = _figure(bars, height=110 + 44 * len(table)).update_xaxes(tickformat=".0%", range=[0, 1.12])
    figure.update_traces(textposition="outside", cliponaxis=False, hovertemplate=None)
    caption = (
        "PED-ANOVA: how far a setting decides which trials are the best. fANOVA: how much of all differences "
        "it explains. A choice that spoils its trials is large in fANOVA, and may be small in PED-ANOVA."
    )
    yield Chart(_key("importances", index), f"Importance of settings for {metric}", figure, caption)


def forests(comparisons: Mapping[str, Any]) -> list[Chart]:
    """Plot the difference of each precision to fp32 with its interval, for each comparison with verdicts."""
    return [_forest(name, result) for name, result in comparisons.items() if result.get("verdicts")]


def _forest(question: str, comparison: Mapping[str, Any]) -> Chart:
    key, title = "verdicts", "Difference to fp32 on new seeds"
    if question != "precisions":
        key, title = f"{key}_{question}", f"{title}: {question.replace('_', ' ')}"
    rows, margin = list(comparison["verdicts"])[::-1], comparison["margin"]
    ends = [-0.6, len(rows) - 0.4]
    traces = [
        _line("no difference", [0.0] * 2, ends),
        _line("margin", [-margin] * 2, ends, dash="dash"),
    ]
    for position, row in enumerate(rows):
        if not is_number(row["low"]):
            continue
        color, symbol = PRECISION_STYLES.get(row["precision"], _OTHER_STYLE)
        interval = format_interval(row["difference"], row["low"], row["high"], "+")
        point = _marker(row["precision"], [row["difference"]], [position], (color, symbol))
        sides = [row["high"] - row["difference"]], [row["difference"] - row["low"]]
        point["error_x"] = {"array": sides[0], "arrayminus": sides[1], "color": color}
        text = _text(f"{row['name']}: {interval} {row['unit']}")
        traces.append(point | {"hovertext": [text], "hoverinfo": "text", "showlegend": False})
    names = [row["name"] if is_number(row["low"]) else f"{row['name']}\n(no interval)" for row in rows]
    figure = _figure(traces, f"{rows[0]['unit']} of {rows[0]['metric']}", height=170 + 34 * len(rows))
    figure.update_yaxes(**_category_axis(names))
    caption = (
        "Each end of an interval errs in at most 2.5% of comparisons, whenever they stop. As good: right of "
        f"the margin of {margin:g}; worse: left of it."
    )
    return Chart(key, title, figure, caption)


def _figure(
    traces: Sequence[Mapping[str, Any]], x_label: str = "", y_label: str = "", height: int = 420
) -> go.Figure:
    axis = {"gridcolor": _GRID_COLOR, "zeroline": False, "automargin": True, "linecolor": _AXIS_COLOR}
    return go.Figure(list(traces)).update_layout(
        template="none",
        font={"family": "system-ui, sans-serif", "size": 13, "color": _TEXT_COLOR},
        hoverlabel={"align": "left"},
        xaxis={**axis, "title": {"text": _text(x_label) or None}},
        yaxis={**axis, "title": {"text": _text(y_label) or None, "standoff": 12}},
        margin={"l": 8, "r": 12, "t": 8, "b": 8},
        legend={"orientation": "h", "x": 0, "xanchor": "left", "yanchor": "bottom", "y": 1.02},
        height=height,
    )


def _marker(name: str, x: list[Any], y: list[Any], style: tuple[str, str]) -> dict[str, Any]:
    color, symbol = style
    size = 12 if symbol.startswith("triangle") else 10
    outline = {"width": 0.8, "color": _LINE_COLOR}
    marker = {"symbol": symbol, "color": color, "size": size, "opacity": 0.9, "line": outline}
    return _trace(name, x, y) | {"mode": "markers", "marker": marker}


def _line(name: str, x: list[Any], y: list[Any], **line: Any) -> dict[str, Any]:
    line = {"color": _LINE_COLOR, "width": 1.8, **line}
    return _trace(name, x, y) | {"mode": "lines", "line": line}


def _trace(name: str, x: list[Any], y: list[Any]) -> dict[str, Any]:
    shown = _text(name)
    return {"type": "scatter", "name": shown, "legendgroup": shown, "x": x, "y": y, "hoverinfo": "name+y"}


def _points(rows: pd.DataFrame, x: pd.Series, y: pd.Series) -> Iterator[dict[str, Any]]:
    for precision, group in _by_group(rows, rows["precision"]):
        style = PRECISION_STYLES.get(precision, _OTHER_STYLE)
        points = _marker(precision, list(x[group.index]), list(y[group.index]), style)
        yield points | {"hovertext": _hover(group), "hoverinfo": "text"}


def _front_line(front: pd.DataFrame, x: pd.Series, y: pd.Series, x_direction: str) -> dict[str, Any]:
    order = x[front.index].sort_values().index
    shape = "vh" if x_direction == "maximize" else "hv"
    return _line("Pareto front", list(x[order]), list(y[order]), dash="dash", shape=shape)


def _front_caption(rows: pd.DataFrame, front: pd.DataFrame, among: str = "") -> str:
    numbers = f"trial {', '.join(map(str, front['number']))}" if len(front) else "none"
    return f"{len(rows)} complete trials. On the Pareto front{among}: {numbers}."


def _hover(rows: pd.DataFrame) -> list[str]:
    metrics = [column.removeprefix("objective.") for column in rows if column.startswith("objective.")]
    names, texts = searched_parameters(rows), []
    for row in rows.to_dict("records"):
        lines = [
            f"trial {row['number']}: {row['outcome']}",
            f"requested {row['precision']}, ran {row['effective']}",
            *(f"{metric} {format_metric(metric, row[objective_column(metric)])}" for metric in metrics),
            f"{format_number(row['train_examples_per_second'])} examples/s",
        ]
        values = {name: row[f"param.{name}"] for name in names}
        lines += [f"{name} {format_cell(value)}" for name, value in values.items() if not pd.isna(value)]
        texts.append(_text("\n".join(lines)))
    return texts


def _by_group(rows: pd.DataFrame, groups: pd.Series) -> list[tuple[str, pd.DataFrame]]:
    return sorted(rows.groupby(groups), key=lambda pair: group_order(pair[0]))


def _category_axis(names: Sequence[str]) -> dict[str, Any]:
    return {
        "tickmode": "array",
        "tickvals": list(range(len(names))),
        "ticktext": list(map(_text, names)),
        "range": [-0.6, len(names) - 0.4],
        "showgrid": False,
    }


def _objective(rows: pd.DataFrame, metric: str) -> pd.Series:
    return _scaled(rows[objective_column(metric)], metric)


def _scaled(values: pd.Series, metric: str) -> pd.Series:
    return values.astype(float) / (2**30 if metric.endswith("_bytes") else 1)


def _label(metric: str) -> str:
    return f"{metric[: -len('_bytes')].replace('_', ' ')} (GiB)" if metric.endswith("_bytes") else metric


def _text(text: str) -> str:
    """Escape a text, since plotly interprets some HTML in every text."""
    return html.escape(text).replace("\n", "<br>")


def _key(name: str, index: int) -> str:
    return name if index == 0 else f"{name}_{index + 1}"
