"""What a chart is, and how plotly draws it in the report and the dashboard.

Colours are those of Okabe and Ito (2008), which people with the common colour-blindnesses can tell apart.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import plotly.graph_objects as go

PRECISION_STYLES = {
    # precision: (colour, plotly's marker)
    "fp32": ("#0072B2", "circle"),
    "tf32": ("#56B4E9", "square"),
    "bf16": ("#D55E00", "diamond"),
    "fp16": ("#E69F00", "triangle-up"),
    "bf16-true": ("#CC79A7", "triangle-down"),
    "fp8": ("#009E73", "pentagon"),
}

OTHER_STYLE = ("#6B6B6B", "x-thin-open")

TICK_WIDTH = 22
"""Characters of a line where the y axis holds names; that of a device may be long."""
LEGEND_WIDTH = 40
"""Likewise of the legend."""
GRID_COLOR, AXIS_COLOR, TEXT_COLOR = "#E3E6EA", "#9AA4AF", "#22272E"
PLOTLY_STEPS = {"line": "linear", "steps_after": "hv", "steps_before": "vh"}


@dataclass(frozen=True)
class Series:
    """Points, a line, a staircase, or the name as a text at each point.

    Series of one name share a legend entry.
    """

    name: str
    color: str
    x: Sequence[float]
    y: Sequence[float]
    draw: Literal["points", "line", "steps_after", "steps_before", "text"] = "points"
    markers: str = "circle"
    """plotly's symbol."""
    hover: Sequence[str] = ()
    """Plain text about each point."""
    dashed: bool = False
    with_markers: bool = False
    in_legend: bool = True


def interval_line(name: str, color: str, x: Sequence[float], y: Sequence[float]) -> Series:
    """An interval from one point to another, across or upright, with a cap at both ends."""
    caps = "line-ns-open" if y[0] == y[1] else "line-ew-open"
    return Series(name, color, x, y, "line", markers=caps, with_markers=True, in_legend=False)


@dataclass(frozen=True)
class Chart:
    """One chart. Without series it is not shown."""

    key: str
    title: str
    x_label: str = ""
    y_label: str = ""
    series: Sequence[Series] = ()
    caption: str = ""
    x_ticks: Sequence[str] = ()
    """Names of the positions 0, 1, 2 ... where an axis holds categories."""
    y_ticks: Sequence[str] = ()
    x_log: bool = False
    x_whole: bool = False
    """Whether x is a whole number."""
    height: int = 420
    """Pixels, of the interactive chart."""


def plotly_figure(chart: Chart, standalone: bool = True) -> go.Figure:
    """The chart for a browser: `standalone` has a title and takes the size of its container.

    Names are escaped because plotly interprets some HTML in every text.
    """
    import plotly.graph_objects as go

    figure = go.Figure([_plotly_trace(series) for series in chart.series])
    axis = {"gridcolor": GRID_COLOR, "zeroline": False, "automargin": True, "linecolor": AXIS_COLOR}
    place = {"yref": "container", "y": 0} if standalone else {"y": 1.02}
    own = {"title": {"text": html.escape(chart.title), "x": 0.01}} if standalone else {"height": chart.height}
    figure.update_layout(
        template="none",
        font={"family": "system-ui, sans-serif", "size": 13, "color": TEXT_COLOR},
        hoverlabel={"align": "left"},
        xaxis={**axis, "title": {"text": html.escape(chart.x_label) or None}},
        yaxis={**axis, "title": {"text": html.escape(chart.y_label) or None, "standoff": 12}},
        margin={"l": 8, "r": 12, "t": 48 if standalone else 8, "b": 8},
        legend={"orientation": "h", "x": 0, "xanchor": "left", "yanchor": "bottom", **place},
        **own,
    )
    xs = [x for series in chart.series for x in series.x]
    ys = [y for series in chart.series for y in series.y]
    figure.update_xaxes(range=_equal_values_range(xs, 0.5 if chart.x_whole else None))
    figure.update_yaxes(range=_equal_values_range(ys))
    if chart.x_log:
        figure.update_xaxes(type="log")
    if chart.x_whole and max(xs) < 10:
        figure.update_xaxes(dtick=1)
    if chart.x_ticks:
        # Slanted to the left where they do not fit: to the right, plotly hides the last one.
        figure.update_xaxes(**_category_axis(chart.x_ticks), autotickangles=[0, -45, -90])
    if chart.y_ticks:
        names = [textwrap.fill(name, TICK_WIDTH) for name in chart.y_ticks]
        figure.update_yaxes(**_category_axis(names), tickfont_size=11)
    return figure


def _equal_values_range(values: Iterable[float], half: float | None = None) -> tuple[float, float] | None:
    """Return the range of an axis whose values are all equal; plotly would take 1 to each side.

    Args:
        half: half of its width; None: 5% of the value, and 0.05 around 0.
    """
    known = {float(value) for value in values if math.isfinite(value)}
    if len(known) != 1:
        return None
    (value,) = known
    half = half or 0.05 * abs(value) or 0.05
    return value - half, value + half


def _plotly_trace(series: Series) -> dict[str, Any]:
    trace: dict[str, Any] = {
        "type": "scatter",
        "name": html.escape(textwrap.fill(series.name, LEGEND_WIDTH)).replace("\n", "<br>"),
        "x": list(series.x),
        "y": list(series.y),
        "legendgroup": html.escape(series.name),
        "showlegend": series.in_legend,
        "hovertext": [html.escape(text).replace("\n", "<br>") for text in series.hover] or None,
        "hoverinfo": "text" if series.hover else "name+y",
    }
    if series.draw == "text":
        return trace | {
            "mode": "text",
            "text": trace["name"],
            "textfont": {"color": series.color, "size": 12},
        }
    marker: dict[str, Any] = {"symbol": series.markers, "size": 6}
    if series.draw == "points":
        size = 12 if series.markers.startswith("triangle") else 10
        outline = {"width": 0.8, "color": "#333333"}
        marker |= {"color": series.color, "size": size, "opacity": 0.9, "line": outline}
        return trace | {"mode": "markers", "marker": marker}
    dash, shape = "dash" if series.dashed else "solid", PLOTLY_STEPS[series.draw]
    line = {"color": series.color, "width": 1.8, "dash": dash, "shape": shape}
    return trace | {
        "mode": "lines+markers" if series.with_markers else "lines",
        "marker": marker,
        "line": line,
    }


def _category_axis(names: Sequence[str]) -> dict[str, Any]:
    return {
        "tickmode": "array",
        "tickvals": list(range(len(names))),
        "ticktext": [html.escape(name).replace("\n", "<br>") for name in names],
        "range": [-0.6, len(names) - 0.4],
        "showgrid": False,
    }
