"""The charts of a detailed evaluation: intervals of metrics, classes, confusions."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hpo.config.objective import smaller_is_better
from hpo.report.detailed_tables import Detailed, interval_text, intervals, off_diagonal, sorted_classes
from hpo.report.figures import TICK_WIDTH, Chart, Series, interval_line
from hpo.report.formats import format_number
from hpo.study.reading.study_record import is_number
from hpo.tasks.registry import known_kind

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#6B6B6B"

MAX_CLASSES = 30
"""With more, the chart has the classes of the lowest F1, and the most frequent confusions are bars."""
MAX_WRITTEN = 12
"""Of more classes, the cells of a matrix have no numbers in them."""
MAX_PAIRS = 20


def task_charts(one: Detailed, task: str) -> list[Chart]:
    """The charts of a task, those that there is something to draw for."""
    of_task = one.tasks[task]
    place = f"{one.name}_task_{list(one.tasks).index(task) + 1}"
    charts = (
        classes_chart(of_task, f"classes_{place}", task),
        confusion_chart(of_task, f"confusion_{place}", task),
    )
    return [chart for chart in charts if chart is not None]


def intervals_chart(one: Detailed) -> Chart | None:
    """The metrics with their intervals, the first on top; None: there is none to draw."""
    rows = [row for row in intervals(one) if is_number(row["value"])]
    shown = [row for row in rows if not smaller_is_better(row["metric"])][::-1]
    if not shown:
        return None
    series: list[Series] = []
    for at, row in enumerate(shown):
        name = f"{row['task'] or 'all tasks'} {row['metric']}"
        if is_number(row["low"]) and is_number(row["high"]):
            series.append(interval_line(name, BLUE, [row["low"], row["high"]], [at, at]))
        text = f"{name}: {interval_text(row)}"
        series.append(Series(name, BLUE, [row["value"]], [at], hover=[text], in_legend=False))
    is_known = all(is_number(row["low"]) and is_number(row["high"]) for row in shown)
    unknown = "" if is_known else "; without a line it is not known"
    caption = f"The dot is the value, the line its interval{unknown}."
    if len(shown) < len(rows):
        caption += " Errors, in the unit of what is predicted, are in the table alone."
    return Chart(
        f"intervals_{one.name}",
        f"Metrics of trial {one.trial_number} on {one.split}",
        x_label="value of the metric",
        series=series,
        y_ticks=[" ".join(filter(None, (row["task"], row["metric"]))) for row in shown],
        caption=caption,
        height=90 + 30 * len(shown),
    )


def classes_chart(of_task: Mapping[str, Any], key: str, task: str) -> Chart | None:
    """F1 of each class as a bar, with precision and recall as marks; the lowest F1 on top."""
    known = [one for one in sorted_classes(of_task) if is_number(one["f1"])]
    shown = sorted(known, key=lambda one: one["f1"])[:MAX_CLASSES][::-1]
    if not shown:
        return None
    places = list(range(len(shown)))
    hover = [
        f"{one['name']}\n"
        + ", ".join(f"{name} {format_number(one[name])}" for name in ("f1", "precision", "recall"))
        + f"\n{format_number(one['support'])} true, {format_number(one['num_predicted'])} predicted"
        for one in shown
    ]
    series = [Series("F1", "#9CC7E3", [one["f1"] for one in shown], places, "bars", hover=hover)]
    for name, color, markers in (
        ("precision", ORANGE, "triangle-up"),
        ("recall", GREEN, "square"),
    ):
        at = [place for place in places if is_number(shown[place][name])]
        values = [shown[place][name] for place in at]
        told = [hover[place] for place in at]
        series.append(Series(name, color, values, at, markers=markers, hover=told))
    names = [f"{one['name']} ({format_number(one['support'])})" for one in shown]
    num = len(of_task["classes"])
    which = f"The {len(shown)} lowest F1 of {num} classes" if len(shown) < num else "By F1, the lowest first"
    return Chart(
        key,
        f"{task}: F1 by class",
        x_label="F1, precision, recall",
        series=series,
        y_ticks=names,
        caption=f"{which}; in brackets the number of true ones.",
        height=120 + _row_height(names) * len(names),
    )


def confusion_chart(of_task: Mapping[str, Any], key: str, task: str) -> Chart | None:
    """Which class is predicted where which is true: a matrix, or of many classes the most frequent pairs."""
    confusion = of_task["confusion"]
    if not confusion or not confusion["counts"]:
        return None
    is_matrix = len(confusion["labels"]) <= MAX_CLASSES
    return _matrix(of_task, key, task) if is_matrix else _pairs(of_task, key, task)


def _matrix(of_task: Mapping[str, Any], key: str, task: str) -> Chart:
    labels, counts = of_task["confusion"]["labels"], of_task["confusion"]["counts"]
    supports = _supports(of_task)
    cells = [
        (true, said, count, count / max(supports[labels[true]], count, 1)) for true, said, count in counts
    ]
    last = len(labels) - 1
    several = known_kind(of_task["kind"]).is_list
    hover = [
        f"true {labels[true]}, predicted {labels[said]}\n"
        f"{format_number(count)} rows, {share:.0%} of those where {labels[true]} holds"
        for true, said, count, share in cells
    ]
    names = [f"{index} {label}" for index, label in enumerate(labels, 1)][::-1]
    is_small = len(labels) <= MAX_WRITTEN
    matrix = Series(
        "rows",
        BLUE,
        [said for _, said, *_ in cells],
        [last - true for true, *_ in cells],
        "cells",
        shades=[share for *_, share in cells],
        texts=[format_number(count) if is_small else "" for *_, count, _ in cells],
        hover=hover,
        in_legend=False,
    )
    what = (
        "Rows in which the class of the line holds and that of the column is predicted; a row may count in "
        "several cells."
        if several
        else "Rows of the class of the line that were predicted as that of the column."
    )
    return Chart(
        key,
        f"{task}: {'true and predicted together' if several else 'confusion'}",
        x_label="predicted",
        y_label="true",
        series=[matrix],
        x_ticks=[str(index) for index in range(1, len(labels) + 1)],
        y_ticks=names,
        caption=f"{what} Dark: a large share of the line's rows. Empty: none.",
        height=120 + _row_height(names) * len(names),
    )


def _pairs(of_task: Mapping[str, Any], key: str, task: str) -> Chart | None:
    pairs, supports = off_diagonal(of_task), _supports(of_task)
    shown = pairs[:MAX_PAIRS][::-1]
    if not shown:
        return None
    hover = [
        f"true {true}, predicted {said}\n{format_number(count)} rows of {format_number(supports[true])}"
        for true, said, count in shown
    ]
    names = [f"{true} → {said}" for true, said, _ in shown]
    several = known_kind(of_task["kind"]).is_list
    what = "predicted together with another class that holds" if several else "taken for another"
    return Chart(
        key,
        f"{task}: what is most often {what}",
        x_label="rows",
        series=[
            Series("rows", ORANGE, [count for *_, count in shown], list(range(len(shown))), "bars",
                   hover=hover, in_legend=False)
        ],
        y_ticks=names,
        caption=f"True → predicted: the {len(shown)} most frequent of {len(pairs)} pairs of "
        f"{len(of_task['confusion']['labels'])} classes.",
        height=110 + _row_height(names) * len(names),
    )  # fmt: skip


def _row_height(names: Sequence[str]) -> int:
    """Pixels, so that the longest of the names, wrapped, does not run into the next."""
    return 12 + 14 * max(len(textwrap.wrap(name, TICK_WIDTH)) for name in names)


def _supports(of_task: Mapping[str, Any]) -> Mapping[str, int]:
    """Rows of each class; where the classes do not say it, those of the matrix."""
    known = {one["name"]: one["support"] for one in of_task["classes"] if is_number(one["support"])}
    labels: Sequence[str] = of_task["confusion"]["labels"]
    counted: Counter[str] = Counter()
    for true, _, count in of_task["confusion"]["counts"]:
        counted[labels[true]] += count
    return counted | known
