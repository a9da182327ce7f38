"""The chart of a detailed evaluation: the confusion matrix of a task."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hpo.report.figures import TICK_WIDTH, Chart, Series
from hpo.report.formats import format_number
from hpo.study.reading.study_record import is_number
from hpo.tasks.registry import known_kind

BLUE = "#0072B2"

MAX_CLASSES = 30
"""A task with more classes has no matrix, but a table of its most frequent confusions."""
MAX_WRITTEN = 12
"""The cells of a matrix with more classes have no numbers in them."""


def confusion_chart(of_task: Mapping[str, Any], key: str, task: str) -> Chart | None:
    """The confusion matrix; None without one, or with more classes than a matrix can show."""
    confusion = of_task["confusion"]
    if not confusion or not confusion["counts"] or len(confusion["labels"]) > MAX_CLASSES:
        return None
    labels, counts = confusion["labels"], confusion["counts"]
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
