"""What `hpo compare` has found of a study, as charts and a table: what somebody decides from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from hpo.config.comparison import REFERENCE
from hpo.outcome import Outcome
from hpo.report.compared import ratio
from hpo.report.figures import OTHER_STYLE, PRECISION_STYLES, TEXT_COLOR, Chart, Series, interval_line
from hpo.report.formats import format_interval
from hpo.report.tables import ON, StudyTables
from hpo.study.study_record import is_number

MARGIN_COLOR = "#6B6B6B"

_COLUMNS = ["precision", "question", "metric", "difference", "verdict", "failed", "seeds", "would decide"]

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
            "difference": format_interval(row["difference"], row["low"], row["high"], sign="+"),
            "verdict": "noise floor" if row["is_noise_floor"] else row["verdict"].replace("_", " "),
            "failed": str(row["num_failed"]),
            "seeds": str(row["num_seeds"]),
            "would decide": str((not row["is_noise_floor"] and row["seeds_needed"]) or "–"),
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
            "paired difference": format_interval(there["difference"], there["low"], there["high"], "+"),
            "speed": ratio(there, "speed_ratio"),
            "memory": ratio(there, "memory_ratio"),
        }
        for row in paired
        for there in row["devices"]
    )


def kept_apart(tables: StudyTables) -> list[str]:
    """Why a verdict over several kinds of device is no evidence for any of them."""
    reasons = {row["precision"]: row["not_pooled"] for row in _deciding(tables) if row["not_pooled"]}
    return [f"{precision}: {why}." for precision, why in reasons.items()]


def untrained(tables: StudyTables) -> list[str]:
    """A sentence on each precision of which compared trials ended without a score, with the reason."""
    told = []
    for found in _precisions(tables):
        num_without = found["num_trials"] - found["outcomes"].get(Outcome.COMPLETE, 0)
        if num_without:
            reason = f": {found['reason']}" if found["reason"] else "."
            of = f"{num_without} of {found['num_trials']}"
            told.append(f"{found['precision']}: {of} trials have no score ({_counts(found)}){reason}")
    return told


def forest(tables: StudyTables) -> Chart:
    """The difference of each precision to fp32 with its interval, in the metric that decides."""
    key, title = "verdicts", "Difference to fp32 on new seeds"
    rows = _deciding(tables)[::-1]
    if not rows:
        return Chart(key, title, absent=f"{NOT_COMPARED} {tables.record.name}")
    margin = tables.record.comparisons["precisions"]["margin"]
    ends = [-0.6, len(rows) - 0.4]
    series = [
        Series("no difference", MARGIN_COLOR, [0.0, 0.0], ends, "line"),
        Series("margin", MARGIN_COLOR, [-margin, -margin], ends, "line", dashed=True),
    ]
    known = [row for row in rows if is_number(row["low"])]
    extent = [0.0, -margin, *(row[end] for row in known for end in ("low", "high"))]
    middle = (min(extent) + max(extent)) / 2
    for position, row in enumerate(rows):
        if row not in known:
            text = _why_none(tables, row)
            series.append(Series(text, TEXT_COLOR, [middle], [position], "text", in_legend=False))
            continue
        color, markers = PRECISION_STYLES.get(row["precision"], OTHER_STYLE)
        text = f"{_name(row)}: {format_interval(row['difference'], row['low'], row['high'], sign='+')} points"
        place = [position, position]
        series.append(interval_line(row["precision"], color, [row["low"], row["high"]], place))
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
        series.append(interval_line(row["precision"], color, [x, x], [row["low"], row["high"]]))
        if is_number(row["speed_ratio_low"]):
            ends = [row["speed_ratio_low"], row["speed_ratio_high"]]
            series.append(interval_line(row["precision"], color, ends, [y, y]))
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
    # Of a comparison that was stored without.
    nothing = {"devices": (), "not_pooled": "", "num_failed": 0, "seeds_needed": None}
    return [] if found is None else [{**nothing, **row} for row in found["verdicts"]]


def _precisions(tables: StudyTables) -> list[Mapping[str, Any]]:
    return list(tables.record.comparisons.get("precisions", {}).get("precisions", ()))


def _counts(found: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{count} {name}" for name, count in found["outcomes"].items() if name != Outcome.COMPLETE
    )


def _why_none(tables: StudyTables, row: Mapping[str, Any]) -> str:
    """Instead of an interval."""
    for found in _precisions(tables):
        is_meant = found["precision"] in (row["precision"], REFERENCE)
        if is_meant and found["num_trials"] and not found["outcomes"].get(Outcome.COMPLETE):
            return f"no {found['precision']} trial has a score"
    return "too few pairs have a score"


def _deciding(tables: StudyTables) -> list[Mapping[str, Any]]:
    rows = _rows(tables)
    return [row for row in rows if row["metric"] == rows[0]["metric"]]


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['precision']}, {'other seeds' if row['is_noise_floor'] else row['question']}"
