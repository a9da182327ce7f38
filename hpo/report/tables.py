"""A study as tables, which the report, the dashboard and the command line read.

What counts where, so that precisions can be compared:

- A trial belongs to the precision that was *requested*. Its metric, speed and memory count there only when
  that precision is what ran (requested = effective, and the dtypes observed agree). A trial that fell back
  is counted among the trials and left out of the statistics.
- A trial that shared its device is left out of speed. Speeds of different devices are never put together:
  a study that ran on several has one row for each precision and device.
- Wasted time is time in trials that ended as neither `complete` nor `pruned`; preempted ones have not ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pandas as pd

from hpo.device import DeviceInfo
from hpo.outcome import Outcome
from hpo.precision.table import PRECISION, PRECISION_NAMES, support
from hpo.report.formats import format_bytes, format_metric, format_number, format_seconds
from hpo.study.study_record import is_number

if TYPE_CHECKING:
    from hpo.study.study_record import StudyRecord, TrialRecord

OUTCOMES = (*Outcome, "running", "waiting")
"""In the order of tables and charts."""

QUANTITIES = ("train_examples_per_second", "train_tokens_per_second", "peak_memory_bytes")
"""The table by precision has their median, min and max."""

_TELEMETRY = {
    # column: where a trial's telemetry has it
    "effective": "precision.effective",
    "support": "precision.support",
    "agrees": "precision.agrees",
    "disagreement": "precision.reason",
    "compatibility": "compatibility.verdict",
    "device": "device.name",
    "shared": "device.shared",
    "train_examples_per_second": "throughput.train_examples_per_second",
    "train_tokens_per_second": "throughput.train_tokens_per_second",
    "evaluation_examples_per_second": "throughput.evaluation_examples_per_second",
    "peak_memory_bytes": "peak_memory_bytes",
    "device_utilization": "device_utilization",
    "skipped_steps": "scaler.skipped_steps",
    "fp32_fallbacks": "fp32_fallbacks",
    "num_steps": "num_steps",
}


def trials_table(record: StudyRecord) -> pd.DataFrame:
    """One row per trial: outcome, precision facts, cost, `objective.<metric>`, `param.<name>`.

    `counts` says whether the trial stands for its requested precision, `counts_for_speed` whether its
    throughput may be compared. `start_seconds` and `end_seconds` are relative to the study's first trial.
    """
    first_start = min((trial.started for trial in record.trials if trial.started), default=None)
    rows = [_trial_row(record, trial, first_start) for trial in record.trials]
    columns = [
        "number",
        "outcome",
        "reason",
        "precision",
        *_TELEMETRY,
        "counts",
        "counts_for_speed",
        "worker",
    ]
    columns += ["start_seconds", "end_seconds", "seconds", *map(objective_column, record.metric_names)]
    params = {key: None for row in rows for key in row if key.startswith("param.")}
    return pd.DataFrame(rows, columns=[*columns, *params])


def objective_column(metric: str) -> str:
    """The column of an objective's values: its name alone may be that of a measured quantity."""
    return f"objective.{metric}"


def _trial_row(record: StudyRecord, trial: TrialRecord, first_start: datetime | None) -> dict[str, Any]:
    row = {column: _look_up(trial.telemetry, path) for column, path in _TELEMETRY.items()}
    requested = (
        _look_up(trial.telemetry, "precision.requested")
        or trial.params.get(PRECISION)
        or _look_up(record.definition, f"training.{PRECISION}")
        or "auto"
    )
    counts = row["effective"] == requested and row["agrees"] is not False
    shared = bool(row["shared"])
    row |= {
        "number": trial.number,
        "outcome": trial.outcome,
        "reason": trial.reason or "",
        "precision": requested,
        "support": "unsupported" if trial.outcome == Outcome.UNSUPPORTED else row["support"],
        "disagreement": row["disagreement"] or "",
        "shared": shared,
        "counts": counts,
        "counts_for_speed": counts and not shared and is_number(row["train_examples_per_second"]),
        "worker": str(trial.attributes.get("worker") or ""),
        "start_seconds": _seconds_between(first_start, trial.started),
        "end_seconds": _seconds_between(first_start, trial.ended),
        "seconds": trial_seconds(trial),
    }
    values = trial.values or (None,) * len(record.metric_names)
    row.update(zip(map(objective_column, record.metric_names), values, strict=True))
    return row | {f"param.{name}": value for name, value in trial.params.items()}


def _look_up(values: Mapping[str, Any], path: str) -> Any:
    """`values["a"]["b"]` for the path `a.b`; None where that is missing."""
    first, _, rest = path.partition(".")
    value = values.get(first)
    return _look_up(value or {}, rest) if rest else value


def trial_seconds(trial: TrialRecord) -> float | None:
    """Seconds of work in the trial; of one that was interrupted, without the time that it waited."""
    if trial.telemetry.get("resumed_from_step") is None:
        return trial.seconds
    parts = [trial.telemetry.get(f"{part}_seconds") or 0.0 for part in ("train", "evaluation")]
    return sum(parts) or trial.seconds


def differing_settings(trials: pd.DataFrame) -> list[str]:
    """The searched settings, but precision and seed, that have several values in rows of `trials_table`."""
    names = [name for name in searched_parameters(trials) if name != "seed"]
    return sorted(name for name in names if trials[f"param.{name}"].nunique(dropna=False) > 1)


def searched_parameters(trials: pd.DataFrame) -> list[str]:
    """The parameters, but the precision, that `trials_table` has a column `param.<name>` of."""
    names = (column.removeprefix("param.") for column in trials if column.startswith("param."))
    return [name for name in names if name != PRECISION]


def undrawn_precisions(record: StudyRecord) -> dict[str, str]:
    """The study's choices of precision that no trial asked for, each with the reason why no device that
    worked on the study can run it. The reason is empty where one can, or where that is not known."""
    devices = [device for trial in record.trials if (device := trial.telemetry.get("device"))]
    choices = _look_up(record.definition, "search_space.fp_precision.choices") if devices else None
    emulated = bool(_look_up(record.definition, "amp.allow_emulated"))
    undrawn = {}
    for name in sorted(set(choices or ()) - set(trials_table(record)["precision"]), key=precision_order):
        reasons = {_why_not(name, device, emulated) for device in devices}
        undrawn[name] = "" if "" in reasons else " ".join(sorted(reasons))
    return undrawn


def _why_not(name: str, facts: Mapping[str, Any], allow_emulated: bool) -> str:
    """Why a device, as a trial's telemetry describes it, cannot run the precision; empty if it may."""
    capability = facts.get("compute_capability")
    major, _, minor = (capability or "0.0").partition(".")
    device = DeviceInfo(
        type=str(facts.get("type")),
        name=str(facts.get("name")),
        compute_capability=(int(major), int(minor)) if capability else None,
        cpu_features=frozenset(facts.get("cpu_features") or ()),
    )
    found = support(name, device)
    is_known = bool(capability) or "cpu_features" in facts or found.level == "unsupported"
    runs = found.level == "native" or (found.level == "emulated" and allow_emulated)
    return found.reason if is_known and not runs else ""


def summary_by_precision(record: StudyRecord) -> pd.DataFrame:
    """One row per requested precision, and per device where the study ran on several.

    Columns: `precision`, `device`, `support` (native, emulated, unsupported; for a choice of the study
    that no trial drew, `not run here` where no device can run it, else `not drawn`), `trials`, one count per
    outcome, `fell_back`, `best_<metric>` and `median_<metric>` over the `complete` trials that count,
    `measured` (trials that speed and memory are from), median, min and max of
    `train_examples_per_second`, `train_tokens_per_second` and `peak_memory_bytes`, `skipped_steps` and
    `fp32_fallbacks` (sums), `seconds`, `wasted_seconds`, `share_of_time` (of the study's, 0 to 1).
    Missing numbers are NaN.
    """
    trials = trials_table(record)
    devices = sorted(trials["device"].dropna().unique())
    trials["device"] = trials["device"].fillna("not known") if len(devices) > 1 else "".join(devices)
    total_seconds = float(pd.to_numeric(trials["seconds"]).sum())
    nothing = _summary_row(record, trials.iloc[:0], total_seconds)
    rows = [
        {"precision": precision, "device": device, **_summary_row(record, group, total_seconds)}
        for (precision, device), group in trials.groupby(["precision", "device"])
    ]
    for precision, reason in undrawn_precisions(record).items():
        named = {"precision": precision, "device": "".join(devices) if len(devices) == 1 else ""}
        rows.append({**named, **nothing, "support": "not run here" if reason else "not drawn"})
    rows.sort(key=lambda row: (precision_order(row["precision"]), row["device"]))
    return pd.DataFrame(rows, columns=["precision", "device", *nothing])


def _summary_row(record: StudyRecord, group: pd.DataFrame, total_seconds: float) -> dict[str, Any]:
    counted = group[group["counts"].astype(bool)]
    complete = counted[counted["outcome"] == Outcome.COMPLETE]
    trained = counted[counted["train_examples_per_second"].notna()]
    for_speed = counted[counted["counts_for_speed"].astype(bool)]
    seconds = pd.to_numeric(group["seconds"])
    row: dict[str, Any] = {
        "support": ", ".join(sorted(group["support"].dropna().unique())),
        "trials": len(group),
        **{str(outcome): int((group["outcome"] == outcome).sum()) for outcome in OUTCOMES},
        "fell_back": int((group["effective"].notna() & (group["effective"] != group["precision"])).sum()),
    }
    for metric, direction in zip(record.metric_names, record.directions, strict=True):
        values = pd.to_numeric(complete[objective_column(metric)])
        row[f"best_{metric}"] = values.max() if direction == "maximize" else values.min()
        row[f"median_{metric}"] = values.median()
    row["measured"] = len(for_speed)
    for quantity in QUANTITIES:
        values = pd.to_numeric((trained if quantity == "peak_memory_bytes" else for_speed)[quantity])
        row |= {f"{quantity}_{name}": getattr(values, name)() for name in ("median", "min", "max")}
    for count in ("skipped_steps", "fp32_fallbacks"):
        row[count] = int(pd.to_numeric(counted[count]).sum())
    wasted = [outcome for outcome in Outcome if outcome.wasted]
    row["seconds"] = float(seconds.sum())
    row["wasted_seconds"] = float(seconds[group["outcome"].isin(wasted)].sum())
    row["share_of_time"] = row["seconds"] / total_seconds if total_seconds else math.nan
    return row


def evaluations_table(record: StudyRecord) -> pd.DataFrame:
    """One row per evaluation of a trial: trial, precision, step, epoch, seconds, speed, every metric."""
    precision = trials_table(record).set_index("number")["precision"]
    rows = [
        {"number": trial.number, "precision": precision[trial.number]}
        | {field.name: getattr(row, field.name) for field in fields(row) if field.name != "metrics"}
        | flat_metrics(row.metrics)
        for trial in record.trials
        for row in trial.evaluations
    ]
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=["number", "precision", "step", "epoch"])


def flat_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """`{"criteria": {"f1_macro": 0.5}, "score": 0.5}` -> `{"criteria/f1_macro": 0.5, "score": 0.5}`."""
    flat: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}/{metric}": number for metric, number in value.items()}
        else:
            flat[name] = value
    return flat


def task_metrics_table(trial: TrialRecord) -> pd.DataFrame:
    """Every metric of every task of one trial: task, metric, value."""
    metrics = trial.telemetry.get("metrics") or {}
    rows = [(task, metric, value) for task, values in metrics.items() for metric, value in values.items()]
    return pd.DataFrame(rows, columns=["task", "metric", "value"])


def reasons_table(record: StudyRecord) -> pd.DataFrame:
    """Every trial that is not complete, and why."""
    trials = trials_table(record)
    rest = trials[trials["outcome"] != Outcome.COMPLETE]
    return rest[["number", "precision", "outcome", "seconds", "reason"]].reset_index(drop=True)


def precision_order(precision: str) -> tuple[int, str]:
    """Sorts precisions as in the table of precisions, unknown names last."""
    known = precision in PRECISION_NAMES
    return (PRECISION_NAMES.index(precision) if known else len(PRECISION_NAMES), precision)


def _seconds_between(start: datetime | None, end: datetime | None) -> float | None:
    return (end - start).total_seconds() if start and end else None


def readable_summary(record: StudyRecord, brief: bool = False) -> pd.DataFrame:
    """`summary_by_precision` as text for people; `brief` keeps what fits a terminal of 100 columns."""
    summary = summary_by_precision(record)
    several_devices = summary["device"].nunique() > 1
    occurring = [outcome for outcome in OUTCOMES if summary[outcome].any()]
    rows = []
    for row in summary.to_dict("records"):
        cells = {"precision": row["precision"]} | ({"device": row["device"]} if several_devices else {})
        cells |= {"support": row["support"] or "–", "trials": str(row["trials"])}
        if brief:
            cells["outcomes"] = ", ".join(f"{row[name]} {name}" for name in occurring if row[name])
        else:
            cells |= {name.replace("_", " "): str(row[name]) for name in (*occurring, "fell_back")}
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
            cells |= {name.replace("_", " "): str(row[name]) for name in ("skipped_steps", "fp32_fallbacks")}
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
    header = [" on ".join(filter(None, row)) for row in table[names].itertuples(index=False)]
    return table.drop(columns=names).T.set_axis(header, axis=1).reset_index(names="requested precision")


def _spread(row: Mapping[str, Any], quantity: str, show: Callable[[Any], str]) -> str:
    low, middle, high = (row[f"{quantity}_{name}"] for name in ("min", "median", "max"))
    if not is_number(middle):
        return "–"
    return str(show(middle)) if low == high else f"{show(middle)} ({show(low)} to {show(high)})"
