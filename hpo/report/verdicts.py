"""The results of `hpo compare`, as tables and charts: for terminal, page and dashboard.

The sentences are `hpo.compare.words`', as they were stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from hpo.report.figures import OTHER_STYLE, PRECISION_STYLES, TEXT_COLOR, Chart, Series, interval_line
from hpo.report.formats import format_interval, format_number
from hpo.report.tables import ON, StudyTables
from hpo.study.reading.study_record import StudyRecord, is_number

MARGIN_COLOR = "#6B6B6B"

NOT_COMPARED = "Precisions were not compared on new seeds: hpo compare"

_COLUMNS = ["precision", "metric", "difference", "verdict", "runs", "collapsed", "speed", "memory", "stored"]

Comparison = Mapping[str, Any]
"""The result of a comparison, as it is stored."""


def sentences(tables: StudyTables) -> list[str]:
    """What each comparison of the study comes to."""
    return [
        f"{comparison['recommendation']}{'' if comparison['has_ended'] else ' (the comparison goes on)'}"
        for comparison in tables.record.comparisons.values()
    ]


def details(comparison: Comparison) -> list[str]:
    """The verdict on each precision with what it rests on, collapsed runs, and the search's own best."""
    told = [row["sentence"] for row in comparison.get("verdicts", ())]
    told += [f"Collapsed: {sentence}" for sentence in comparison.get("collapsed", ())]
    return [*told, *filter(None, [comparison.get("tuned_sentence")])]


def chosen_on_test(record: StudyRecord) -> list[str]:
    """A sentence where `hpo compare` has chosen between precisions on the test split."""
    asked = [
        _name(row)
        for comparison in record.comparisons.values()
        for row in comparison.get("verdicts", ())
        if comparison.get("split") == "test" and row["num_runs"]
    ]
    if not asked:
        return []
    used = f"The test split has been used to choose between fp32 and {', '.join(asked)} (`hpo compare`)"
    return [f"{used}: a score on test of what was chosen is a little too good."]


def comparison_tables(comparison: Comparison) -> list[pd.DataFrame]:
    """Those of one comparison that have something in them."""
    made = (verdict_table, device_table, configuration_table)
    return [table for table in (make(comparison) for make in made) if not table.empty]


def verdict_table(comparison: Comparison) -> pd.DataFrame:
    """A row for each precision of the metric that decides, then one for each task's own metric."""
    rows = []
    for row in comparison.get("verdicts", ()):
        metrics = {row["metric"]: row, **row["tasks"]}
        for metric, of_metric in metrics.items():
            decides = metric == row["metric"]
            rows.append(
                {
                    "precision": _name(row),
                    "metric": metric,
                    "difference": format_interval(*_bounds(of_metric), sign="+"),
                    "verdict": row["verdict"].replace("_", " ") if decides else "",
                    "runs": str(row["num_runs"]) if decides else "",
                    "collapsed": _collapsed(row) if decides else "",
                    "speed": _ratio(row, "speed_ratio") if decides else "",
                    "memory": _ratio(row, "memory_ratio") if decides else "",
                    "stored": _ratio(row, "stored_ratio") if decides else "",
                }
            )
    table = pd.DataFrame(rows, columns=_COLUMNS)
    return table if table["stored"].str.contains(r"\d").any() else table.drop(columns="stored")


def configuration_table(comparison: Comparison) -> pd.DataFrame:
    """A row for each configuration: its trial, and the settings that differ; of one, all."""
    rows = comparison.get("configurations", ())
    names = dict.fromkeys(name for row in rows for name in row["params"])
    differing = [name for name in names if len({repr(row["params"].get(name)) for row in rows}) > 1]
    return pd.DataFrame(
        {
            "trial": str(row["trial"]),
            **{name: _cell(row["params"].get(name)) for name in (differing if len(rows) > 1 else names)},
        }
        for row in rows
    )


def device_table(comparison: Comparison) -> pd.DataFrame:
    """Speed and memory on each kind of device, a row for each precision; empty where there was one kind."""
    return pd.DataFrame(
        {
            "precision": _name(row),
            "device": there["device"],
            "speed": _ratio(there, "speed_ratio"),
            "memory": _ratio(there, "memory_ratio"),
        }
        for row in comparison.get("verdicts", ())
        for there in row["devices"]
        if len(row["devices"]) > 1
    )


def forests(tables: StudyTables) -> list[Chart]:
    """`forest` of each comparison with fp32."""
    compared = tables.record.comparisons.items()
    return [forest(tables, question) for question, comparison in compared if comparison.get("verdicts")]


def forest(tables: StudyTables, question: str = "precisions") -> Chart:
    """The difference of each precision to fp32 with its interval, in the metric that decides."""
    key, title = "verdicts", "Difference to fp32 on new seeds"
    if question != "precisions":
        key, title = f"{key}_{question}", f"{title}: {question.replace('_', ' ')}"
    comparison: Comparison = tables.record.comparisons.get(question, {})
    rows = list(comparison.get("verdicts", ()))[::-1]
    if not rows:
        return Chart(key, title, absent=f"{NOT_COMPARED} {tables.record.name}")
    margin = comparison["margin"]
    ends = [-0.6, len(rows) - 0.4]
    series = [
        Series("no difference", MARGIN_COLOR, [0.0, 0.0], ends, "line"),
        Series("margin", MARGIN_COLOR, [-margin, -margin], ends, "line", dashed=True),
    ]
    known = [row for row in rows if is_number(row["low"])]
    extent = [0.0, -margin, *(row[end] for row in known for end in ("low", "high"))]
    for position, row in enumerate(rows):
        if row not in known:
            middle = (min(extent) + max(extent)) / 2
            text = row["reason"] or "too few runs for an interval"
            series.append(Series(text, TEXT_COLOR, [middle], [position], "text", in_legend=False))
            continue
        color, markers = PRECISION_STYLES.get(row["precision"], OTHER_STYLE)
        text = f"{_name(row)}: {format_interval(*_bounds(row), sign='+')} {row['unit']}"
        place = [position, position]
        series.append(interval_line(row["precision"], color, [row["low"], row["high"]], place))
        point = [row["difference"]], [position]
        series.append(Series(row["precision"], color, *point, markers=markers, hover=[text], in_legend=False))
    return Chart(
        key,
        title,
        x_label=f"{rows[0]['unit']} of {rows[0]['metric']}",
        series=series,
        y_ticks=[_name(row) for row in rows],
        caption=(
            "Each end of an interval, over new runs and new texts, errs with 2.5 % at whichever look the "
            f"comparison stopped. As good: right of the margin of {margin:g}; worse: left of it."
        ),
        height=170 + 34 * len(rows),
    )


def speed_and_quality(tables: StudyTables) -> list[Chart]:
    """Speed over fp32's against the difference, both with their intervals, on each kind of device."""
    key, title = "verdicts_speed", "Speed against quality on new seeds"
    rows = list(tables.record.comparisons.get("precisions", {}).get("verdicts", ()))
    devices = sorted({there["device"] for row in rows for there in row["devices"]})
    if len(devices) < 2:
        return [_speed_and_quality(rows, key, title)]
    charts = []
    for place, device in enumerate(devices, 1):
        here = [{**row, **there} for row in rows for there in row["devices"] if there["device"] == device]
        charts.append(_speed_and_quality(here, f"{key}_device_{place}", f"{title}{ON}{device}"))
    return charts


def _speed_and_quality(rows: Sequence[Comparison], key: str, title: str) -> Chart:
    rows = [row for row in rows if is_number(row["speed_ratio"]) and is_number(row["low"])]
    if not rows:
        return Chart(key, title, absent="No pair of trials tells the speed: each must have its device alone.")
    series = [Series("fp32", PRECISION_STYLES["fp32"][0], [1.0], [0.0], markers=PRECISION_STYLES["fp32"][1])]
    for row in rows:
        color, markers = PRECISION_STYLES.get(row["precision"], OTHER_STYLE)
        x, y = row["speed_ratio"], row["difference"]
        text = f"{row['precision']}: {x:.2f} times as fast, {y:+.2f} {row['unit']}"
        series.append(Series(row["precision"], color, [x], [y], markers=markers, hover=[text]))
        series.append(interval_line(row["precision"], color, [x, x], [row["low"], row["high"]]))
        if is_number(row["speed_ratio_low"]):
            ends = [row["speed_ratio_low"], row["speed_ratio_high"]]
            series.append(interval_line(row["precision"], color, ends, [y, y]))
    return Chart(
        key,
        title,
        x_label="training speed over fp32's, of pairs",
        y_label=f"{rows[0]['unit']} of {rows[0]['metric']} against fp32",
        series=series,
        caption="The same configurations and seeds under each precision.",
    )


def _name(row: Comparison) -> str:
    """What is compared with fp32; results of an earlier version are of `fp_precision` alone."""
    return str(row.get("name", row["precision"]))


def _bounds(row: Comparison) -> tuple[Any, Any, Any]:
    return row["difference"], row["low"], row["high"]


def _ratio(row: Comparison, name: str) -> str:
    if len(row.get("devices", ())) > 1:
        return "by device"
    return format_interval(row.get(name), row.get(f"{name}_low"), row.get(f"{name}_high"))


def _collapsed(row: Comparison) -> str:
    """How many did, and how many may."""
    if not row["num_runs"]:
        return "–"
    return f"{row['num_collapsed']} (≤ {100 * row['collapse_share']:.0f} %)"


def _cell(value: Any) -> str:
    return format_number(value) if value is None or isinstance(value, float) else str(value)
