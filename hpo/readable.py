"""Numbers and precision facts as text for people: the command line, the report and the dashboard use it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from hpo.tables import OUTCOMES, is_number, summary_by_precision

if TYPE_CHECKING:
    from hpo.study_record import StudyRecord, TrialRecord


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


def format_metric(metric: str, value: Any) -> str:
    """An objective's value: bytes with their unit, everything else as a number."""
    return format_bytes(value) if metric.endswith("_bytes") else format_number(value)


def format_number(value: Any) -> str:
    """About four significant digits: 0.8214, 152.3, 12 840, 3e-05."""
    if not is_number(value):
        return "–"
    number = float(value)
    if number == 0 or abs(number) >= 1000:
        return f"{number:,.0f}".replace(",", "\u202f")
    return f"{number:.4g}"


def format_bytes(value: Any) -> str:
    """Binary units: 512 MiB, 1.43 GiB."""
    if not is_number(value):
        return "–"
    mebibytes = float(value) / 2**20
    return f"{mebibytes:.0f} MiB" if mebibytes < 1000 else f"{mebibytes / 1024:.3g} GiB"


def format_seconds(value: Any) -> str:
    """0.4 s, 12 s, 3 min 20 s, 2 h 05 min."""
    if not is_number(value):
        return "–"
    seconds = float(value)
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def precision_facts(trial: TrialRecord) -> str:
    """One sentence: what was requested, what ran, what was observed, and whether these agree."""
    precision = trial.telemetry.get("precision") or {}
    if not precision:
        return "Nothing about its precision is stored."
    observed = precision.get("observed") or {}
    seen = [
        f"{count} linear layers gave {dtype}"
        for dtype, count in (observed.get("linear_dtypes") or {}).items()
    ]
    if observed.get("float8_linears"):
        seen.append(f"{observed['float8_linears']} float8 layers")
    if "tf32" in observed:
        seen.append(f"TF32 {'on' if observed['tf32'] else 'off'}")
    if "compiled" in observed:
        seen.append("compiled" if observed["compiled"] else "not compiled")
    agrees = precision.get("agrees")
    verdict = "not compared" if agrees is None else "they agree" if agrees else "they do NOT agree"
    sentence = (
        f"requested {precision.get('requested')}, effective {precision.get('effective')} "
        f"({precision.get('support')}), observed: {', '.join(seen) or 'nothing'}; {verdict}"
    )
    reason = precision.get("reason")
    return f"{sentence} ({reason.rstrip('.')})." if reason else f"{sentence}."


def format_value(value: Any) -> str:
    """A parameter as one would write it in a study file; floats in full, so that it can be repeated."""
    return repr(value) if isinstance(value, float) else str(value)
