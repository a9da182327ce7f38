"""The summary by precision as text for people: the command line, the report and the dashboard show it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from hpo.report.formats import format_bytes, format_metric, format_number, format_seconds
from hpo.report.tables import OUTCOMES, summary_by_precision
from hpo.study.ranking import is_number

if TYPE_CHECKING:
    from hpo.study.study_record import StudyRecord


def readable_summary(record: StudyRecord, brief: bool = False) -> pd.DataFrame:
    """`summary_by_precision` as text for people; `brief` keeps what fits a terminal of 100 columns."""
    summary = summary_by_precision(record)
    several_devices = summary["device"].nunique() > 1
    occurring = [outcome for outcome in OUTCOMES if summary[outcome].any()]
    rows = []
    for row in summary.to_dict("records"):
        cells = {"precision": row["precision"]}
        if several_devices:
            cells["device"] = row["device"]
        cells["support"] = row["support"] or "–"
        cells["trials"] = str(row["trials"])
        if brief:
            cells["outcomes"] = ", ".join(f"{row[name]} {name}" for name in occurring if row[name])
        else:
            cells |= {outcome: str(row[outcome]) for outcome in occurring}
            cells["fell back"] = str(row["fell_back"])
        for metric in record.metric_names:
            cells[f"{metric}, best"] = format_metric(metric, row[f"best_{metric}"])
            cells[f"{metric}, median"] = format_metric(metric, row[f"median_{metric}"])
        if brief:
            cells["examples/s"] = format_number(row["train_examples_per_second_median"])
            cells["memory"] = format_bytes(row["peak_memory_bytes_median"])
        else:
            cells["train examples/s"] = _spread(row, "train_examples_per_second", format_number)
            cells["train tokens/s"] = _spread(row, "train_tokens_per_second", format_number)
            cells["trials measured"] = str(row["measured"])
            cells["peak memory"] = _spread(row, "peak_memory_bytes", format_bytes)
            cells["skipped steps"] = str(row["skipped_steps"])
            cells["fp32 fallbacks"] = str(row["fp32_fallbacks"])
            cells["time"] = format_seconds(row["seconds"])
        cells["share of time"] = "–" if math.isnan(row["share_of_time"]) else f"{row['share_of_time']:.1%}"
        cells["wasted"] = format_seconds(row["wasted_seconds"])
        rows.append(cells)
    return pd.DataFrame(rows)


def precision_comparison(record: StudyRecord) -> pd.DataFrame:
    """`readable_summary` on its side, to compare: a row per quantity, a column per precision."""
    table = readable_summary(record)
    if table.empty:
        return table
    names = list(table.columns[: 2 if "device" in table else 1])
    header = [" on ".join(row) for row in table[names].itertuples(index=False)]
    return table.drop(columns=names).T.set_axis(header, axis=1).reset_index(names="requested precision")


def _spread(row: Mapping[str, Any], quantity: str, show: Callable[[Any], str]) -> str:
    low, middle, high = (row[f"{quantity}_{name}"] for name in ("min", "median", "max"))
    if not is_number(middle):
        return "–"
    return str(show(middle)) if low == high else f"{show(middle)} ({show(low)} to {show(high)})"
