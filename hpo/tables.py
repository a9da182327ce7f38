"""A study as tables. The report, its figures, the dashboard and the command line all read these, so every
number has one definition.

What is counted where decides whether a comparison of precisions is honest:

- A trial belongs to the precision that was *requested*. Its metric, speed and memory count there only when
  that precision is what ran (requested = effective, and the dtypes observed agree). A trial that fell back
  is counted among the trials and left out of the statistics.
- A trial that shared its device is left out of speed. Speeds of different devices are never put together:
  a study that ran on several has one row for each precision and device.
- Wasted time is time in trials that ended without an answer: neither `complete` nor `pruned`, and not
  still going on (running, waiting, preempted).
"""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from hpo.precision import PRECISION_NAMES

if TYPE_CHECKING:
    from hpo.study_record import StudyRecord, TrialRecord

OUTCOMES = (
    "complete",
    "pruned",
    "nonfinite",
    "incompatible",
    "unsupported",
    "oom",
    "failed",
    "preempted",
    "running",
    "waiting",
)
UNFINISHED = ("preempted", "running", "waiting")
WASTED = ("nonfinite", "incompatible", "unsupported", "oom", "failed")

LOW_UTILIZATION = 0.8
"""Under this share of busy time a device could do more: the report says what to raise."""

MIN_TRIALS_FOR_IMPORTANCES = 8
"""PED-ANOVA compares the best trials with all of them; with fewer there is nothing to compare."""

MIN_TOP_TRIALS = 5
"""Optuna's advice for PED-ANOVA: at least five trials among the best."""


@dataclass(frozen=True)
class Notice:
    """Something a reader must know before drawing conclusions, and what can be done about it."""

    text: str
    advice: str


def trial_outcome(trial: TrialRecord) -> str:
    """The stored outcome, or the one that the Optuna state stands for while none is stored."""
    if trial.outcome:
        return trial.outcome
    return {"fail": "failed"}.get(trial.state.lower(), trial.state.lower())


def trials_table(record: StudyRecord) -> pd.DataFrame:
    """One row per trial: outcome, precision facts, cost, `objective.<metric>`, `param.<name>`.

    `counts` says whether the trial stands for its requested precision, `counts_for_speed` whether its
    throughput may be compared. `start_seconds` and `end_seconds` are relative to the study's first trial.
    """
    fixed_precision = (record.definition.get("training") or {}).get("fp_precision")
    starts = [trial.started for trial in record.trials if trial.started]
    first_start = min(starts) if starts else None
    rows = [_trial_row(record, trial, fixed_precision, first_start) for trial in record.trials]
    columns = [*_TRIAL_COLUMNS, *map(objective_column, record.metric_names)]
    params = {key: None for row in rows for key in row if key.startswith("param.")}
    return pd.DataFrame(rows, columns=[*columns, *params])


def objective_column(metric: str) -> str:
    """The column of an objective's values: its name alone may be that of a measured quantity."""
    return f"objective.{metric}"


_TRIAL_COLUMNS = (
    "number",
    "outcome",
    "reason",
    "precision",
    "effective",
    "support",
    "agrees",
    "disagreement",
    "counts",
    "counts_for_speed",
    "compatibility",
    "device",
    "shared",
    "worker",
    "start_seconds",
    "end_seconds",
    "seconds",
    "train_examples_per_second",
    "train_tokens_per_second",
    "evaluation_examples_per_second",
    "peak_memory_bytes",
    "device_utilization",
    "skipped_steps",
    "fp32_fallbacks",
    "num_steps",
)


def _trial_row(
    record: StudyRecord, trial: TrialRecord, fixed_precision: str | None, first_start: datetime | None
) -> dict[str, Any]:
    telemetry = trial.telemetry
    precision = telemetry.get("precision") or {}
    device = telemetry.get("device") or {}
    throughput = telemetry.get("throughput") or {}
    requested = precision.get("requested") or trial.params.get("fp_precision") or fixed_precision or "auto"
    effective = precision.get("effective")
    agrees = precision.get("agrees")
    counts = effective == requested and agrees is not False
    examples_per_second = throughput.get("train_examples_per_second")
    shared = bool(device.get("shared"))
    outcome = trial_outcome(trial)
    start = _seconds_between(first_start, trial.started)
    row: dict[str, Any] = {
        "number": trial.number,
        "outcome": outcome,
        "reason": trial.reason or "",
        "precision": requested,
        "effective": effective,
        "support": "unsupported" if outcome == "unsupported" else precision.get("support"),
        "agrees": agrees,
        "disagreement": precision.get("reason") or "",
        "counts": counts,
        "counts_for_speed": counts and not shared and _is_number(examples_per_second),
        "compatibility": (telemetry.get("compatibility") or {}).get("verdict"),
        "device": device.get("name"),
        "shared": shared,
        "worker": worker_of(trial),
        "start_seconds": start,
        "end_seconds": _seconds_between(first_start, trial.ended),
        "seconds": trial_seconds(trial),
        "train_examples_per_second": examples_per_second,
        "train_tokens_per_second": throughput.get("train_tokens_per_second"),
        "evaluation_examples_per_second": throughput.get("evaluation_examples_per_second"),
        "peak_memory_bytes": telemetry.get("peak_memory_bytes"),
        "device_utilization": telemetry.get("device_utilization"),
        "skipped_steps": (telemetry.get("scaler") or {}).get("skipped_steps"),
        "fp32_fallbacks": telemetry.get("fp32_fallbacks"),
        "num_steps": telemetry.get("num_steps"),
    }
    values = trial.values or (None,) * len(record.metric_names)
    row.update(zip(map(objective_column, record.metric_names), values, strict=True))
    row.update({f"param.{name}": _plain(value) for name, value in trial.params.items()})
    return row


def trial_seconds(trial: TrialRecord) -> float | None:
    """Seconds of work in the trial. For one that was interrupted, from begin to end would count the time
    that it waited: there it is the training and evaluation of all its runs."""
    if trial.telemetry.get("resumed_from_step") is None:
        return trial.seconds
    parts = [trial.telemetry.get(f"{part}_seconds") or 0.0 for part in ("train", "evaluation")]
    return sum(parts) or trial.seconds


def worker_of(trial: TrialRecord) -> str:
    """Who ran the trial, as stored; empty when that is not known."""
    return str(trial.attributes.get("worker") or "")


def complete_trials(record: StudyRecord) -> list[TrialRecord]:
    """Trials that were trained and evaluated, each with finite values."""
    return [
        trial
        for trial in record.trials
        if trial_outcome(trial) == "complete" and trial.values and all(map(_is_number, trial.values))
    ]


def best_trials(record: StudyRecord) -> list[TrialRecord]:
    """The best complete trial; with several objectives, all trials of the Pareto front. Maybe none."""
    complete = complete_trials(record)
    if not complete:
        return []
    values = np.array([trial.values for trial in complete], dtype=float)
    if len(record.metric_names) == 1:
        return [complete[int((values * _signs(record.directions)).argmin())]]
    front = pareto_front(values, record.directions)
    return [trial for trial, on_front in zip(complete, front, strict=True) if on_front]


def pareto_front(values: np.ndarray, directions: Sequence[str]) -> np.ndarray:
    """bool [N]: rows of `values` [N, K] that no other row equals or beats in all K and beats in one."""
    losses = values * _signs(directions)
    return np.array(
        [not ((losses <= row).all(axis=1) & (losses < row).any(axis=1)).any() for row in losses], dtype=bool
    )


def _signs(directions: Sequence[str]) -> np.ndarray:
    """Factors that make lower better."""
    return np.array([-1.0 if direction == "maximize" else 1.0 for direction in directions])


def summary_by_precision(record: StudyRecord) -> pd.DataFrame:
    """One row per requested precision, and per device where the study ran on several.

    Columns: `precision`, `device`, `support` (native, emulated, unsupported), `trials`, one count per
    outcome, `fell_back`, `best_<metric>` and `median_<metric>` over the `complete` trials that count,
    `measured` (trials that speed and memory are from), median, min and max of
    `train_examples_per_second`, `train_tokens_per_second` and `peak_memory_bytes`, `skipped_steps` and
    `fp32_fallbacks` (sums), `seconds`, `wasted_seconds`, `share_of_time` (of the study's, 0 to 1).
    Missing numbers are NaN.
    """
    trials = trials_table(record)
    devices = sorted(trials["device"].dropna().unique())
    if len(devices) > 1:
        trials["device"] = trials["device"].fillna("not known")
    else:
        trials["device"] = devices[0] if devices else ""
    total_seconds = float(pd.to_numeric(trials["seconds"]).sum())
    groups = sorted(
        trials.groupby(["precision", "device"]),
        key=lambda item: (precision_order(item[0][0]), item[0][1]),
    )
    rows = [
        {"precision": precision, "device": device, **_summary_row(record, group, total_seconds)}
        for (precision, device), group in groups
    ]
    return pd.DataFrame(rows, columns=["precision", "device", *_summary_columns(record)])


def _summary_row(record: StudyRecord, group: pd.DataFrame, total_seconds: float) -> dict[str, Any]:
    counted = group[group["counts"].astype(bool)]
    complete = counted[counted["outcome"] == "complete"]
    seconds = pd.to_numeric(group["seconds"])
    row: dict[str, Any] = {
        "support": ", ".join(sorted(group["support"].dropna().unique())),
        "trials": len(group),
        **{outcome: int((group["outcome"] == outcome).sum()) for outcome in OUTCOMES},
        "fell_back": int((group["effective"].notna() & (group["effective"] != group["precision"])).sum()),
    }
    for metric, direction in zip(record.metric_names, record.directions, strict=True):
        values = pd.to_numeric(complete[objective_column(metric)])
        row[f"best_{metric}"] = values.max() if direction == "maximize" else values.min()
        row[f"median_{metric}"] = values.median()
    trained = counted[counted["train_examples_per_second"].notna()]
    for_speed = counted[counted["counts_for_speed"].astype(bool)]
    row["measured"] = len(for_speed)
    for quantity, trials in (
        ("train_examples_per_second", for_speed),
        ("train_tokens_per_second", for_speed),
        ("peak_memory_bytes", trained),
    ):
        values = pd.to_numeric(trials[quantity])
        row |= {f"{quantity}_{name}": getattr(values, name)() for name in ("median", "min", "max")}
    row["skipped_steps"] = int(pd.to_numeric(counted["skipped_steps"]).sum())
    row["fp32_fallbacks"] = int(pd.to_numeric(counted["fp32_fallbacks"]).sum())
    row["seconds"] = float(seconds.sum())
    row["wasted_seconds"] = float(seconds[group["outcome"].isin(WASTED)].sum())
    row["share_of_time"] = row["seconds"] / total_seconds if total_seconds else math.nan
    return row


def _summary_columns(record: StudyRecord) -> list[str]:
    metrics = [f"{name}_{metric}" for metric in record.metric_names for name in ("best", "median")]
    spreads = [
        f"{quantity}_{name}"
        for quantity in ("train_examples_per_second", "train_tokens_per_second", "peak_memory_bytes")
        for name in ("median", "min", "max")
    ]
    tail = ["skipped_steps", "fp32_fallbacks", "seconds", "wasted_seconds", "share_of_time"]
    return ["support", "trials", *OUTCOMES, "fell_back", *metrics, "measured", *spreads, *tail]


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


def _spread(row: Mapping[str, Any], quantity: str, show: Any) -> str:
    low, middle, high = (row[f"{quantity}_{name}"] for name in ("min", "median", "max"))
    if not _is_number(middle):
        return "–"
    return str(show(middle)) if low == high else f"{show(middle)} ({show(low)} to {show(high)})"


def evaluations_table(record: StudyRecord) -> pd.DataFrame:
    """One row per evaluation of a trial: trial, precision, step, epoch, seconds, speed, every metric."""
    precision = trials_table(record).set_index("number")["precision"]
    rows = [
        {
            "number": trial.number,
            "precision": precision[trial.number],
            "step": row.step,
            "epoch": row.epoch,
            "seconds": row.seconds,
            "train_examples_per_second": row.train_examples_per_second,
            "train_tokens_per_second": row.train_tokens_per_second,
            **flat_metrics(row.metrics),
        }
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
    rows = [
        {"task": task, "metric": metric, "value": value}
        for task, values in metrics.items()
        for metric, value in values.items()
    ]
    return pd.DataFrame(rows, columns=["task", "metric", "value"])


def reasons_table(record: StudyRecord) -> pd.DataFrame:
    """Every trial that is not complete, and why."""
    trials = trials_table(record)
    rest = trials[trials["outcome"] != "complete"]
    return rest[["number", "precision", "outcome", "seconds", "reason"]].reset_index(drop=True)


def why_no_importances(record: StudyRecord) -> str:
    """Empty when importances can be computed, else the reason why they cannot."""
    complete = complete_trials(record)
    if len(complete) < MIN_TRIALS_FOR_IMPORTANCES:
        return (
            f"Importances compare the best trials with the others and need at least "
            f"{MIN_TRIALS_FOR_IMPORTANCES} complete trials; there are {len(complete)}."
        )
    if not any(trial.params for trial in complete):
        return "No parameter was searched."
    values = np.array([trial.values for trial in complete], dtype=float)
    losses = np.sort(values * _signs(record.directions), axis=0)
    if (losses[num_top_trials(len(complete)) - 1] == losses[-1]).any():
        return "The complete trials differ too little in their values to tell the best from the others."
    return ""


def num_top_trials(num_complete: int) -> int:
    """How many trials count as the best for PED-ANOVA: a tenth, but at least five, at most half."""
    return max(math.ceil(0.1 * num_complete), min(MIN_TOP_TRIALS, num_complete // 2))


def importance_table(record: StudyRecord) -> pd.DataFrame:
    """`parameter`, then for each metric the share (0 to 1) of its PED-ANOVA importance.

    Optuna's default evaluator (arXiv 2304.10255), over complete trials, with the number of best trials
    raised from a tenth to at least five. Empty where `why_no_importances` gives a reason.
    """
    if why_no_importances(record):
        return pd.DataFrame(columns=["parameter", *record.metric_names])
    import optuna

    complete = complete_trials(record)
    distributions = _distributions(record, complete)
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(
        target_quantile=num_top_trials(len(complete)) / len(complete)
    )
    directions = [optuna.study.StudyDirection[direction.upper()] for direction in record.directions]
    table = {}
    with _quiet_optuna(), warnings.catch_warnings():
        # A conditional parameter seen in a trial or two; the report says how many trials it has.
        warnings.simplefilter("ignore", UserWarning)
        for index, metric in enumerate(record.metric_names):
            study = optuna.create_study(direction=directions[index])
            for trial in complete:
                used = {name: distributions[name] for name in trial.params}
                params = {name: _for_optuna(trial.params[name], used[name]) for name in used}
                value = (trial.values or ())[index]
                study.add_trial(optuna.trial.create_trial(params=params, distributions=used, value=value))
            table[metric] = optuna.importance.get_param_importances(study, evaluator=evaluator)
    frame = pd.DataFrame(table).rename_axis("parameter").reset_index()
    return frame.sort_values(record.metric_names[0], ascending=False, ignore_index=True)


@contextlib.contextmanager
def _quiet_optuna() -> Iterator[None]:
    """Without the line that Optuna logs for every study made, in memory too."""
    import optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)


def _distributions(record: StudyRecord, complete: Sequence[TrialRecord]) -> dict[str, Any]:
    """Optuna's distributions of the searched parameters, wide enough for every value that was tried.

    Enqueued values may lie outside the study's ranges, and choices may be lists, which Optuna cannot hold.
    """
    import optuna

    space = record.definition.get("search_space") or {}
    distributions: dict[str, Any] = {}
    for name in {name for trial in complete for name in trial.params}:
        seen = [trial.params[name] for trial in complete if name in trial.params]
        given = space.get(name) or {}
        if given.get("type") in ("float", "int") and all(map(_is_number, seen)):
            low, high = min([given["low"], *seen]), max([given["high"], *seen])
            distributions[name] = optuna.distributions.FloatDistribution(
                low, high, log=bool(given.get("log"))
            )
        else:
            choices = dict.fromkeys(json.dumps(value) for value in [*(given.get("choices") or []), *seen])
            distributions[name] = optuna.distributions.CategoricalDistribution(list(choices))
    return distributions


def _for_optuna(value: Any, distribution: Any) -> Any:
    return json.dumps(value) if hasattr(distribution, "choices") else float(value)


def notices(record: StudyRecord) -> list[Notice]:
    """What limits the conclusions of this study, most serious first, each with what to do about it."""
    trials = trials_table(record)
    found: list[Notice] = []

    def add(text: str, advice: str) -> None:
        found.append(Notice(text, advice))

    disagree = trials[trials["agrees"].eq(False) & trials["effective"].eq(trials["precision"])]
    if len(disagree):
        reasons = "; ".join(sorted({reason.rstrip(".") for reason in disagree["disagreement"]} - {""}))
        reasons = reasons or "no reason is stored"
        add(
            f"{_trials(disagree)}: the precision observed is not the one requested ({reasons}).",
            "Left out of the statistics by precision. Run `hpo verify` on that machine.",
        )
    fell_back = trials[trials["effective"].notna() & trials["effective"].ne(trials["precision"])]
    if len(fell_back):
        pairs = fell_back["precision"] + " ran as " + fell_back["effective"]
        add(
            f"{_trials(fell_back)} fell back ({', '.join(sorted(pairs.unique()))}).",
            "Left out of the statistics of both precisions. "
            "With `amp.on_unsupported: prune` such a trial ends at once instead.",
        )
    emulated = trials[trials["support"].eq("emulated") & trials["effective"].notna()]
    if len(emulated):
        add(
            f"{_names(emulated['precision'])} ran emulated on {_names(emulated['device'].dropna())}, which "
            "has no instructions for it.",
            "Its speed here says nothing about a device that has them. "
            "Leave `amp.allow_emulated` off where time matters.",
        )
    degraded = trials[trials["compatibility"].eq("degraded")]
    if len(degraded):
        add(
            f"{_trials(degraded)}: the compatibility check found larger errors than usual against fp32 "
            f"({_names(degraded['precision'])}).",
            "Look at `compatibility` in the trial's telemetry before trusting a small difference in metric.",
        )
    shared = trials[trials["shared"].astype(bool)]
    if len(shared):
        add(
            f"{_trials(shared)} shared a device with other work.",
            "Left out of speed comparisons. Use one worker per device to measure speed.",
        )
    devices = sorted(trials["device"].dropna().unique())
    if len(devices) > 1:
        add(
            f"The study ran on {len(devices)} kinds of device ({', '.join(devices)}).",
            "Compare speeds within one device only; the precision table has a row for each.",
        )
    utilization = pd.to_numeric(trials["device_utilization"]).dropna()
    if len(utilization) and utilization.median() < LOW_UTILIZATION:
        add(
            f"The device was busy {utilization.median():.0%} of the time (median of {len(utilization)} "
            "trials).",
            "Raise `batch_size` (or `micro_batch_size`), or run more workers per device.",
        )
    complete = complete_trials(record)
    if not complete:
        add("No trial is complete.", "Nothing can be concluded from this study yet.")
    else:
        configurations = {
            json.dumps({**trial.params, "seed": None}, sort_keys=True, default=str) for trial in complete
        }
        if len(configurations) == len(complete):
            add(
                f"Each of the {len(complete)} complete configurations was trained with one seed only.",
                "Small differences may be chance: no interval can be given. To say that one precision is as "
                "good as another, train the same configurations under both with several seeds.",
            )
        add(
            "The precision table compares different configurations (learning rate, batch size ...).",
            "It shows what the search found under each precision, not the effect of precision alone.",
        )
    return found


def _trials(trials: pd.DataFrame) -> str:
    numbers = [str(number) for number in trials["number"]]
    shown = ", ".join(numbers[:8]) + (" ..." if len(numbers) > 8 else "")
    return f"{len(numbers)} trial{'s' if len(numbers) > 1 else ''} (number {shown})"


def _names(values: Iterable[Any]) -> str:
    names = sorted(set(map(str, values)), key=precision_order)
    return ", ".join(names) or "this device"


def precision_order(precision: str) -> tuple[int, str]:
    """Sorts precisions as in the table of precisions, unknown names last."""
    known = precision in PRECISION_NAMES
    return (PRECISION_NAMES.index(precision) if known else len(PRECISION_NAMES), precision)


def format_metric(metric: str, value: Any) -> str:
    """An objective's value: bytes with their unit, everything else as a number."""
    return format_bytes(value) if metric.endswith("_bytes") else format_number(value)


def format_number(value: Any) -> str:
    """About four significant digits: 0.8214, 152.3, 12 840, 3e-05."""
    if not _is_number(value):
        return "–"
    number = float(value)
    if number == 0 or abs(number) >= 1000:
        return f"{number:,.0f}".replace(",", "\u202f")
    return f"{number:.4g}"


def format_bytes(value: Any) -> str:
    """Binary units: 512 MiB, 1.43 GiB."""
    if not _is_number(value):
        return "–"
    mebibytes = float(value) / 2**20
    return f"{mebibytes:.0f} MiB" if mebibytes < 1000 else f"{mebibytes / 1024:.3g} GiB"


def format_seconds(value: Any) -> str:
    """0.4 s, 12 s, 3 min 20 s, 2 h 05 min."""
    if not _is_number(value):
        return "–"
    seconds = float(value)
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | tuple | dict) else value


def _seconds_between(start: datetime | None, end: datetime | None) -> float | None:
    return (end - start).total_seconds() if start and end else None
