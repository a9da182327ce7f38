"""The page of `hpo check`: a study's data before anything is trained, in the style of the report."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hpo.data.checks import TaskFacts
from hpo.errors import RunError
from hpo.report.data_check import (
    DataCheck,
    balance_table,
    by_frequency,
    cuts_table,
    leaks_table,
    rows_table,
    tasks_table,
)
from hpo.report.figures import Chart, Series
from hpo.report.page import plot, render
from hpo.report.report import write_whole

SPLIT_STYLES = {"train": ("#0072B2", 0), "validation": ("#E69F00", 1), "test": ("#009E73", 2)}
MAX_BARS = 30
_ROOM = 0.8
"""Of the distance between two classes, what the bars of its splits take together."""


def write_data_page(check: DataCheck, path: Path) -> Path:
    """Write the page. Raises RunError where it cannot be written; an earlier one is then still whole."""
    page = data_html(check).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, page)
    except OSError as error:
        raise RunError(f"the page could not be written to {path}: {error.strerror or error}.") from error
    return path


def data_html(check: DataCheck) -> str:
    """The page of what was found."""
    total = sum(split.num_rows for split in check.facts.splits.values())
    splits = ", ".join(f"{split.num_rows:,} {name}" for name, split in check.facts.splits.items())
    lengths = ", ".join(map(str, check.max_lengths))
    return render(
        "data.html.j2",
        name=check.study,
        facts=[
            f"{total:,} rows: {splits}.",
            f"Lengths in tokens of {check.encoder}, special tokens included.",
            f"This study: max_length {lengths}, long_text {check.long_text}.",
            f"Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.",
        ],
        advice=check.advice,
        rows=rows_table(check),
        tasks=tasks_table(check),
        leaks=leaks_table(check),
        cuts=cuts_table(check),
        lengths=plot(lengths_chart(check)),
        balances=[_balance(task) for task in check.facts.tasks],
    )


def _balance(task: TaskFacts) -> dict[str, Any]:
    chart = balance_chart(task)
    return {
        "name": task.name,
        "kind": task.kind,
        "table": balance_table(task),
        "plot": plot(chart) if chart.series else None,
        "caption": chart.caption,
        "is_long": len(task.labels) > 8,
    }


def balance_chart(task: TaskFacts) -> Chart:
    """Bars of each class (or span name) in each split, in percent, so that splits of any size compare."""
    labels = by_frequency(task)[:MAX_BARS] if task.counts else []
    of = "spans" if task.counts_spans else "labelled rows"
    left_out = f" The {MAX_BARS} most frequent of {len(task.labels)}." if len(task.labels) > MAX_BARS else ""
    num = len(task.counts)
    width = _ROOM / max(num, 1)
    series = []
    for at, (split, counts) in enumerate(task.counts.items()):
        total = sum(counts.values()) if task.counts_spans else task.num_annotated[split]
        shares = [100 * counts[label] / max(total, 1) for label in labels]
        offset = (num - 1 - 2 * at) * width / 2  # plotly draws upwards
        series.append(
            Series(
                split,
                SPLIT_STYLES[split][0],
                x=shares,
                y=[len(labels) - 1 - row + offset for row in range(len(labels))],
                draw="bars",
                hover=[f"{label}: {counts[label]:,} of {total:,} in {split}" for label in labels],
            )
        )
    return Chart(
        key=f"balance_{task.name}",
        title=task.name,
        x_label=f"% of {of}",
        series=series if labels else (),
        caption=f"Percent of {of}, by split.{left_out}",
        y_ticks=labels[::-1],
        bar_width=width,
        height=90 + max(24, 9 * num + 6) * len(labels),
    )


def lengths_chart(check: DataCheck) -> Chart:
    """The share of texts that fit into so many tokens, without the longest hundredth, which would hide it."""
    series = [
        Series(
            split,
            SPLIT_STYLES[split][0],
            x=list(values[:100]),
            y=list(range(100)),
            draw="line",
            hover=[
                f"{share} % of {split} have at most {value:,} tokens" for share, value in enumerate(values)
            ],
        )
        for split, values in check.lengths.quantiles.items()
    ]
    series += [
        Series(f"max_length {length}", "#6B6B6B", x=[length, length], y=[0, 100], draw="line", dashed=True)
        for length in check.max_lengths
    ]
    return Chart(
        key="lengths",
        title="Lengths",
        x_label="tokens",
        y_label="% of texts that fit",
        series=series,
    )
