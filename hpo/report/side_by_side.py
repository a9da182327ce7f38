"""Several studies of one objective on one page: what each has reached, with what, and how its search went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd

from hpo.errors import InputError
from hpo.report.figures import Chart, Series
from hpo.report.formats import format_bytes, format_metric, format_number, format_seconds
from hpo.report.page import plot, render
from hpo.report.report import write_pages
from hpo.report.tables import StudyTables, objective_column, precision_order
from hpo.study.reading.study_record import StudyRecord

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
NO_VERDICT = "Each is one search, so a difference is partly luck: this is no verdict."


def write_side_by_side(records: Sequence[StudyRecord], data: Mapping[str, str | None], out_dir: Path) -> Path:
    """Write the page of these studies into `out_dir`; `data` has the fingerprint of each study's data.

    Raises InputError where they have different objectives, RunError where the page cannot be written.
    """
    if repeated := [name for name, num in Counter(one.name for one in records).items() if num > 1]:
        raise InputError(f"Each study must be named once, but `{repeated[0]}` is named again.")
    goals = {
        one.name: ", ".join(map(" ".join, zip(one.directions, one.metric_names, strict=True)))
        for one in records
    }
    if len({*goals.values()}) > 1:
        told = "; ".join(f"`{name}` has {goal}" for name, goal in goals.items())
        raise InputError(f"Studies side by side must have the same objective, but {told}.")
    path = out_dir / "report.html"
    write_pages(out_dir, {path.name: side_by_side_html(records, data)})
    return path


def side_by_side_html(records: Sequence[StudyRecord], data: Mapping[str, str | None]) -> str:
    """The page."""
    studies = [StudyTables(one) for one in records]
    metrics = records[0].metric_names
    charts = [best_so_far(studies, index) for index in range(len(metrics))]
    return render(
        "side_by_side.html.j2",
        name=" and ".join(one.name for one in records),
        facts=[f"Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC."],
        sentences=[NO_VERDICT, *_warnings(records, data)],
        studies=study_table(studies),
        precisions=[(metric, precision_table(studies, metric)) for metric in metrics],
        charts=[(chart, plot(chart)) for chart in charts if chart.series],
    )


def _warnings(records: Sequence[StudyRecord], data: Mapping[str, str | None]) -> list[str]:
    if len({data[one.name] for one in records}) > 1:
        return ["They have different data: their scores do not compare."]
    if None in data.values():
        return ["Whether they have the same data is not known."]
    return []


def study_table(studies: Sequence[StudyTables]) -> pd.DataFrame:
    """A row for each fact, a column for each study."""
    return pd.DataFrame({one.record.name: _facts(one) for one in studies}).reset_index(names="")


def _facts(tables: StudyTables) -> dict[str, str]:
    record, trials = tables.record, tables.trials
    facts = {"complete trials": f"{len(tables.complete)} of {len(trials)}"}
    best = tables.best[0] if tables.best else None
    for at, metric in enumerate(record.metric_names):
        value = best.values[at] if best and best.values else None
        facts[f"{metric}, best" if not at else f"{metric} there"] = format_metric(metric, value)
    row = {} if best is None else trials.set_index("number").loc[best.number]
    facts |= {
        "its trial": "–" if best is None else str(best.number),
        "its precision": str(row.get("effective") or "–"),
        "its training examples/s": format_number(row.get("train_examples_per_second")),
        "its peak memory": format_bytes(row.get("peak_memory_bytes")),
        "time in trials": format_seconds(float(trials["seconds"].sum())),
        "ran on": ", ".join(tables.devices) or "–",
    }
    return facts


def precision_table(studies: Sequence[StudyTables], metric: str) -> pd.DataFrame:
    """The best value under each precision, a column for each study; of several devices the best of them."""
    best: dict[str, dict[str, str]] = {}
    for one in studies:
        direction = one.record.directions[one.record.metric_names.index(metric)]
        known = one.by_precision.dropna(subset=[f"best_{metric}"]).groupby("precision")[f"best_{metric}"]
        values = known.max() if direction == "maximize" else known.min()
        best[one.record.name] = {name: format_metric(metric, value) for name, value in values.items()}
    table = pd.DataFrame(best, dtype=object).fillna("–")
    return table.loc[sorted(table.index, key=precision_order)].reset_index(names="precision")


def best_so_far(studies: Sequence[StudyTables], index: int) -> Chart:
    """The best value up to each trial, a line for each study."""
    metric, direction = studies[0].record.metric_names[index], studies[0].record.directions[index]
    series = []
    for place, one in enumerate(studies):
        rows = one.complete[one.complete["meets_limits"].eq(True)]
        values = rows[objective_column(metric)].astype(float)
        best = values.cummax() if direction == "maximize" else values.cummin()
        if len(rows):
            color = COLORS[place % len(COLORS)]
            series.append(Series(one.record.name, color, list(rows["number"]), list(best), "steps_after"))
    return Chart(
        f"best_so_far_{index + 1}",
        f"Best {metric} by trial",
        x_label="trial number",
        y_label=metric,
        series=series,
        caption=f"The best up to each trial ({direction}).",
        x_whole=True,
    )
