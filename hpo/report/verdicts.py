"""What `hpo compare` has found of a study, as charts and a table: what somebody decides from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from hpo.report.figures import OTHER_STYLE, PRECISION_STYLES, Chart, Series
from hpo.report.formats import format_number
from hpo.report.tables import ON, StudyTables
from hpo.study.study_record import is_number

MARGIN_COLOR = "#6B6B6B"

_COLUMNS = ["precision", "question", "metric", "difference", "verdict", "seeds", "speed"]

NOT_COMPARED = "Precisions were not compared on new seeds: hpo compare"


def sentences(tables: StudyTables) -> list[str]:
    """What each comparison of the study comes to."""
    return [
        f"{found['recommendation']}{'' if found['has_ended'] else ' (the comparison goes on)'}"
        for found in tables.record.comparisons.values()
    ]


def verdict_table(tables: StudyTables) -> pd.DataFrame:
    """A row for each precision, question and metric; empty where nothing was compared."""
    rows = [
        {
            "precision": row["precision"],
            "question": "other seeds" if row["is_noise_floor"] else row["question"],
            "metric": row["metric"],
            "difference": _between(row["difference"], row["low"], row["high"], sign="+"),
            "verdict": "noise floor" if row["is_noise_floor"] else row["verdict"].replace("_", " "),
            "seeds": str(row["num_seeds"]),
            "speed": "by device"
            if len(row["devices"]) > 1
            else _between(row["speed_ratio"], row["speed_ratio_low"], row["speed_ratio_high"]),
        }
        for row in _rows(tables)
    ]
    return pd.DataFrame(rows, columns=_COLUMNS)


def device_table(tables: StudyTables) -> pd.DataFrame:
    """What the pairs of each kind of device say, a row for each precision; empty where there was one kind."""
    paired = [row for row in _deciding(tables) if row["question"] == "paired" and len(row["devices"]) > 1]
    return pd.DataFrame(
        {
            "precision": row["precision"],
            "device": there["device"],
            "pairs": str(there["num_pairs"]),
            "paired difference": _between(there["difference"], there["low"], there["high"], sign="+"),
            "speed": _between(there["speed_ratio"], there["speed_ratio_low"], there["speed_ratio_high"]),
            "memory": format_number(there["memory_ratio"]),
        }
        for row in paired
        for there in row["devices"]
    )


def kept_apart(tables: StudyTables) -> list[str]:
    """Why a verdict over several kinds of device is no evidence for any of them."""
    reasons = {row["precision"]: row["not_pooled"] for row in _deciding(tables) if row["not_pooled"]}
    return [f"{precision}: {why}." for precision, why in reasons.items()]


def forest(tables: StudyTables) -> Chart:
    """The difference of each precision to fp32 with its interval, in the metric that decides."""
    key, title = "verdicts", "Difference to fp32 on new seeds"
    rows = [row for row in _deciding(tables) if is_number(row["low"])][::-1]
    if not rows:
        return Chart(key, title, absent=f"{NOT_COMPARED} {tables.record.name}")
    margin = tables.record.comparisons["precisions"]["margin"]
    ends = [-0.6, len(rows) - 0.4]
    series = [
        Series("no difference", MARGIN_COLOR, [0.0, 0.0], ends, "line"),
        Series("margin", MARGIN_COLOR, [-margin, -margin], ends, "line", dashed=True),
    ]
    for position, row in enumerate(rows):
        color, markers = PRECISION_STYLES.get(row["precision"], OTHER_STYLE)
        text = f"{_name(row)}: {_between(row['difference'], row['low'], row['high'], sign='+')} points"
        place = [position, position]
        series.append(
            Series(row["precision"], color, [row["low"], row["high"]], place, "line", in_legend=False)
        )
        point = [row["difference"]], [position]
        series.append(Series(row["precision"], color, *point, markers=markers, hover=[text], in_legend=False))
    return Chart(
        key,
        title,
        x_label=f"points of {rows[0]['metric']}",
        series=series,
        y_ticks=[_name(row) for row in rows],
        caption=(
            f"Intervals hold together with 90 % at whichever look the comparison stopped. As good: right of "
            f"the margin of {margin:g} points; worse: left of it. Other seeds: fp32 against itself."
        ),
        height=170 + 34 * len(rows),
    )


def speed_and_quality(tables: StudyTables) -> list[Chart]:
    """Speed over fp32's against the paired difference, both with their intervals, on each kind of device."""
    key, title = "verdicts_speed", "Speed against quality on new seeds"
    paired = [row for row in _deciding(tables) if row["question"] == "paired"]
    devices = sorted({there["device"] for row in paired for there in row["devices"]})
    if len(devices) < 2:
        return [_speed_and_quality(paired, key, title)]
    charts = []
    for place, device in enumerate(devices, 1):
        here = [{**row, **there} for row in paired for there in row["devices"] if there["device"] == device]
        charts.append(_speed_and_quality(here, f"{key}_device_{place}", f"{title}{ON}{device}"))
    return charts


def _speed_and_quality(paired: Sequence[Mapping[str, Any]], key: str, title: str) -> Chart:
    rows = [row for row in paired if is_number(row["speed_ratio"]) and is_number(row["low"])]
    if not rows:
        return Chart(key, title, absent="No pair of trials tells the speed: each must have its device alone.")
    series = [Series("fp32", PRECISION_STYLES["fp32"][0], [1.0], [0.0], markers=PRECISION_STYLES["fp32"][1])]
    for row in rows:
        color, markers = PRECISION_STYLES.get(row["precision"], OTHER_STYLE)
        x, y = row["speed_ratio"], row["difference"]
        text = f"{row['precision']}: {x:.2f} times as fast, {y:+.2f} points"
        series.append(Series(row["precision"], color, [x], [y], markers=markers, hover=[text]))
        series.append(
            Series(row["precision"], color, [x, x], [row["low"], row["high"]], "line", in_legend=False)
        )
        if is_number(row["speed_ratio_low"]):
            ends = [row["speed_ratio_low"], row["speed_ratio_high"]]
            series.append(Series(row["precision"], color, ends, [y, y], "line", in_legend=False))
    return Chart(
        key,
        title,
        x_label="training speed over fp32's, of pairs",
        y_label=f"points of {rows[0]['metric']} against fp32",
        series=series,
        caption="The same configurations and seeds under each precision.",
    )


def _rows(tables: StudyTables) -> list[Mapping[str, Any]]:
    found = tables.record.comparisons.get("precisions")
    nothing = {"devices": (), "not_pooled": ""}  # of a comparison that was stored without
    return [] if found is None else [{**nothing, **row} for row in found["verdicts"]]


def _deciding(tables: StudyTables) -> list[Mapping[str, Any]]:
    rows = _rows(tables)
    return [row for row in rows if row["metric"] == rows[0]["metric"]]


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['precision']}, {'other seeds' if row['is_noise_floor'] else row['question']}"


def _between(value: Any, low: Any, high: Any, sign: str = "") -> str:
    if not is_number(value):
        return "–"
    if not (is_number(low) and is_number(high)):
        return format_number(value)
    return f"{value:{sign}.2f} [{low:{sign}.2f}, {high:{sign}.2f}]".replace(" ", "\u00a0")
